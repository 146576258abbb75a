"""Nothing between prepare_inputs and propose waits for the device, except what is listed here.

The operations of a CPU's steps size tensors by their data; a GPU has others. Each such place is
listed with its reason, and a place that is gone must leave the list.
"""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from helpers.sources import ScopedVisitor, package_sources, parsed

CHECKED = ("runner/", "drafters/", "sampling/", "state/", "ops/sampling/", "ops/step/")
# Their work is to bring results to the host, once it asks for them.
HOST_SIDE = (
    "runner/async_output.py",
    "runner/stream.py",
    "state/host_blocks.py",
    "state/host_copy.py",
)
# References; on a GPU they serve tests alone. ``Edits.pack`` works on tensors of the host.
ON_CPUS = (
    "ops/sampling/logits_rules.py",
    "ops/sampling/logits_rules_reference.py",
    "ops/sampling/sample.py",
    "ops/sampling/truncation.py",
)
READS = frozenset(("item", "cpu", "tolist", "numpy", "synchronize"))
DATA_SIZED = frozenset(("nonzero", "repeat_interleave", "unique", "masked_select", "argwhere"))
REDUCTIONS = frozenset(("any", "all", "max", "min", "sum", "amax", "amin", "equal", "isnan"))

COMPACT = "the operations of a CPU's step lay out rows for the drafts that exist"
ALLOWED = {
    ("ops/step/compact.py", "known_drafts", "tolist"): (1, COMPACT),
    ("ops/step/reference.py", "live_rows", "nonzero"): (2, COMPACT),
}


class SyncCheck(ScopedVisitor):
    """Counts calls that wait for the device, by function and by name of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def _note(self, call: str) -> None:
        self.found[self.scope, call] += 1

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute):
            sized = any(keyword.arg == "output_size" for keyword in node.keywords)
            if function.attr in READS or (function.attr in DATA_SIZED and not sized):
                self._note(function.attr)
            if function.attr == "to" and _mentions_cpu(node):
                self._note("to cpu")
        elif (
            isinstance(function, ast.Name)
            and function.id in ("int", "float", "bool")
            and _may_read_a_tensor(node)
        ):
            self._note(function.id)

    def _test(self, node: ast.If | ast.While | ast.IfExp | ast.Assert) -> None:
        self.generic_visit(node)
        for part in ast.walk(node.test):
            if (
                isinstance(part, ast.Call)
                and isinstance(part.func, ast.Attribute)
                and part.func.attr in REDUCTIONS
            ):
                self._note("branch")

    visit_If = _test
    visit_While = _test
    visit_IfExp = _test
    visit_Assert = _test


def _mentions_cpu(node: ast.Call) -> bool:
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    return any(isinstance(value, ast.Constant) and value.value == "cpu" for value in values)


def _may_read_a_tensor(node: ast.Call) -> bool:
    """Whether a conversion's argument is computed: it calls a method or takes an element."""
    parts = [part for argument in node.args for part in ast.walk(argument)]
    return any(
        isinstance(part, ast.Subscript)
        or (isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute))
        for part in parts
    )


def syncs_in(source: str) -> Counter[tuple[str, str]]:
    check = SyncCheck()
    check.visit(parsed(source))
    return check.found


def test_every_wait_for_the_device_is_listed():
    found = {}
    for name, source in package_sources().items():
        if name.startswith(CHECKED) and name not in HOST_SIDE + ON_CPUS:
            found |= {(name, *place): count for place, count in syncs_in(source).items()}
    assert found == {place: count for place, (count, _) in ALLOWED.items()}


def test_the_list_only_shrinks():
    assert sum(count for count, _ in ALLOWED.values()) <= 3


@pytest.mark.parametrize(
    ("statement", "call"),
    [
        ("n = x.num_tokens.item()", "item"),
        ("torch.cuda.synchronize()", "synchronize"),
        ("n = int(lengths.max())", "int"),
        ("n = float(lengths[0])", "float"),
        ("if (lengths > 3).any(): pass", "branch"),
        ("y = 1 if lengths.max() > 3 else 2", "branch"),
        ("host = x.to('cpu')", "to cpu"),
        ("host = x.to(device='cpu')", "to cpu"),
        ("owner = torch.repeat_interleave(a, b)", "repeat_interleave"),
        ("owner = torch.repeat_interleave(a, b, output_size=8)", None),
        ("rows = live.nonzero().squeeze(1)", "nonzero"),
        ("count = int(self.k)", None),
        ("if not sampling.numel(): pass", None),
        ("x = x.to(torch.float32)", None),
    ],
)
def test_the_checker_finds_planted_waits(statement, call):
    found = syncs_in(f"class C:\n    def f(self):\n        {statement}")
    assert found == ({("C.f", call): 1} if call else {})


def test_the_host_side_does_wait():
    """The exemption is for files that need it."""
    for name in HOST_SIDE + ON_CPUS:
        assert syncs_in(package_sources()[name]), name
