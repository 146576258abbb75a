"""Operations are chosen once: nothing else asks which device it is on, or needs Triton."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sametoken

PACKAGE = Path(sametoken.__file__).parent
CHECKED = ("layers", "drafters", "models", "verification", "runner", "state")
#: Functions that may ask, and why.
ALLOWED = {
    ("models/dummy.py", "dummy_reader"): "shapes alone, on the device that has no memory",
    ("runner/layout_ring.py", "LayoutRing.allocate"): "a GPU reads pinned memory by itself",
    ("runner/process_group.py", "ProcessGroup.__init__"): "each device has its own library",
    ("state/host_copy.py", "HostCopy.of"): "a copy from a GPU lands later",
    ("state/upload.py", "upload"): "to a GPU through pinned memory",
    ("state/upload.py", "to_host"): "from a GPU to pinned memory",
    ("verification/grammar.py", "_permissive"): "masks are pinned where they may travel",
}
#: What an engine on a CPU imports.
ON_CPUS = ("core.layout", "kernels.step.ops", "kernels.step.types", "kernels.step.compact")
OF_ENGINES = ("engine.build", "runner.graphs", "drafters.build")


class AsksForDevice(ast.NodeVisitor):
    """Functions that ask which device a tensor, a process or a step is on."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._scope: list[str] = []

    def _enter(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()

    visit_ClassDef = _enter
    visit_FunctionDef = _enter

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        of_device = ast.unparse(node.value).rpartition(".")[2].endswith("device")
        if node.attr in ("is_cuda", "is_cpu", "is_available") or (
            node.attr == "type" and of_device
        ):
            self.found.add(".".join(self._scope))


def asks_in(source: str) -> set[str]:
    check = AsksForDevice()
    check.visit(ast.parse(source))
    return check.found


def imported_by(name: str) -> list[str]:
    """Modules that importing a module of the package imports first: not those of functions."""
    path = PACKAGE.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def everything_imported_by(name: str) -> set[str]:
    """Its own modules as well as others, and all that those import."""
    seen, left = set(), [f"sametoken.{name}"]
    while left:
        module = left.pop()
        inner = module.removeprefix("sametoken.")
        path = PACKAGE.joinpath(*inner.split("."))
        is_ours = module != inner and (path.is_dir() or path.with_suffix(".py").is_file())
        if module not in seen and is_ours:
            left += imported_by(inner)
        seen.add(module)
    return seen


def test_nobody_asks_for_the_device_but_for_what_is_listed():
    found = {
        (path.relative_to(PACKAGE).as_posix(), function)
        for folder in CHECKED
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for function in asks_in(path.read_text())
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize("name", [*ON_CPUS, *OF_ENGINES])
def test_an_engine_on_a_cpu_imports_no_triton(name):
    imported = everything_imported_by(name)
    assert "torch" in imported or name == "core.layout"
    assert not [module for module in imported if module.partition(".")[0] == "triton"]


def test_the_operations_of_a_step_name_the_types_they_take():
    """Where a device's truth goes in as ``Any``, the type checker sees no wrong field."""
    vague = {}
    for path in sorted((PACKAGE / "kernels" / "step").glob("*.py")):
        names = {
            node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)
        }
        if "Any" in names:
            vague[path.name] = "Any"
    assert vague == {}


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


def test_imports_are_followed():
    assert "triton" in everything_imported_by("kernels.step.triton")
    assert "sametoken.kernels.sampling.keys" in everything_imported_by("kernels.step.compact")
