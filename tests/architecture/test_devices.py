"""Operations are chosen once: nothing else asks which device it is on, or needs Triton."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from helpers.sources import ScopedVisitor, nodes_of, package_sources, parsed

CHECKED = ("layers/", "drafters/", "models/", "sampling/", "runner/", "state/", "distributed/")
#: Functions that may ask, and why.
ALLOWED = {
    ("models/load/dummy.py", "dummy_reader"): "shapes alone, on the device that has no memory",
    ("runner/graphs.py", "LayoutRing.allocate"): "a GPU reads pinned memory by itself",
    ("distributed/trainer_group.py", "_require_backend"): "NCCL is refused where there is no GPU",
    ("distributed/shared_memory.py", "_is_gpu"): "memory of each device is opened in its own way",
    ("distributed/process_group.py", "_is_gpu"): "each device has its own library",
    ("state/caches.py", "_zeros"): "memory of a CPU is taken when it is written",
    ("state/host_copy.py", "HostCopy.of"): "a copy from a GPU lands later",
    ("state/upload.py", "upload"): "to a GPU through pinned memory",
    ("state/upload.py", "to_host"): "from a GPU to pinned memory",
    ("distributed/ranks.py", "LeadingRank.stream"): "work on a GPU is ordered by a CUDA stream",
    ("distributed/ranks.py", "SoleRank.stream"): "work on a GPU is ordered by a CUDA stream",
    ("sampling/grammar_masks.py", "_all_allowed"): "masks are pinned if there is a GPU",
}


class AsksForDevice(ScopedVisitor):
    """Functions that ask which device a tensor, a process or a step is on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        of_device = ast.unparse(node.value).rpartition(".")[2].endswith("device")
        if node.attr in ("is_cuda", "is_cpu", "is_available") or (
            node.attr == "type" and of_device
        ):
            self.found.add(self.scope)


def asks_in(source: str) -> set[str]:
    check = AsksForDevice()
    check.visit(parsed(source))
    return check.found


def test_nobody_asks_for_the_device_but_for_what_is_listed():
    found = {
        (name, function)
        for name, source in package_sources().items()
        if name.startswith(CHECKED)
        for function in asks_in(source)
    }
    assert found == set(ALLOWED)


def test_an_engine_on_a_cpu_imports_no_triton():
    """Triton is part of CUDA builds of torch alone."""
    code = (
        "import sys, sametoken.engine.build, sametoken.runner.graphs, sametoken.ops.step.types\n"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_the_operations_of_a_step_name_the_types_they_take():
    """Where a device's truth goes in as ``Any``, the type checker sees no wrong field."""
    for name, source in package_sources().items():
        if name.startswith("ops/step/"):
            names = {node.id for node in nodes_of(source) if isinstance(node, ast.Name)}
            assert "Any" not in names, name


@pytest.mark.parametrize(
    ("statement", "asks"),
    [
        ("fast = x.is_cuda", True),
        ("fast = x.device.type == 'cuda'", True),
        ("pinned = self._device.type != 'cpu'", True),
        ("pinned = torch.cuda.is_available()", True),
        ("kind = request.type", False),
        ("x = x.to(device)", False),
    ],
)
def test_planted_questions_are_found(statement, asks):
    assert asks_in(f"class C:\n    def f(self):\n        {statement}") == (
        {"C.f"} if asks else set()
    )
