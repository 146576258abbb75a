"""The functions named here alone write the device's truth: nothing else could forget to.

A checker over the syntax trees of the package. Views of a field count as the field;
indexing by tensors makes a copy, which anyone may write.
"""

from __future__ import annotations

import ast

import pytest

from helpers.sources import ScopedVisitor, nodes_of, package_sources, parsed

#: What ``Sequences`` holds, and how far recurrent state is folded.
SEQUENCES = frozenset(
    ("num_tokens", "num_computed", "draft_ids", "num_drafts", "token_ids", "block_table")
)
RECURRENT = frozenset(("position", "num_pending"))
FIELDS = SEQUENCES | RECURRENT
#: Between steps the host; in a step one program a device; of recurrent state the same.
HOST = {
    ("state/slots.py", "admit"): {"token_ids", "num_tokens", "num_computed", "num_drafts"},
    ("state/slots.py", "restart"): {"num_computed"},
    ("state/slots.py", "assign_blocks"): {"block_table"},
    ("runner/kept_states.py", "CacheStates.restore"): RECURRENT,
}
REFERENCE = {
    ("ops/step/reference.py", "commit"): {"token_ids", "num_tokens", "num_computed"},
    ("ops/step/reference.py", "publish"): {"draft_ids", "num_drafts"},
    ("ops/model/recurrent/row_by_row.py", "RowByRowPass.finish"): RECURRENT,
}
TRITON = {
    ("ops/step/triton_commit.py", "_commit_kernel"): {"token_ids", "num_tokens", "num_computed"},
    ("ops/step/triton_commit.py", "_publish_kernel"): {"draft_ids", "num_drafts"},
    ("ops/model/recurrent/runs.py", "_plan_runs_kernel"): RECURRENT,
}
WRITERS = HOST | REFERENCE | TRITON
#: Pointers named like the fields of ``Drafts``, which these kernels make.
OWN_OUTPUTS = ("ops/lookup/ngram_triton.py",)
VIEWS = frozenset(("view", "flatten", "unsqueeze", "squeeze", "t", "transpose", "select", "narrow"))


def _is_view_index(index: ast.expr) -> bool:
    """Whether indexing by it may share memory: it has a slice, a number, or None."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(isinstance(part, ast.Slice | ast.Constant) for part in parts)


def _whole(node: ast.expr) -> ast.expr:
    """What is indexed: nobody writes to a copy that has no name."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


class WriterCheck(ScopedVisitor):
    """Functions and field names of stores into the device's truth."""

    def __init__(self, kernel: bool = False) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._kernel = kernel
        self._aliases: dict[str, str] = {}

    def _field(self, node: ast.expr) -> str | None:
        """The field that an expression shares its memory with, if any."""
        if isinstance(node, ast.Attribute):
            return node.attr if node.attr in FIELDS else None
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        if isinstance(node, ast.Subscript) and _is_view_index(node.slice):
            return self._field(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._field(node.func.value) if node.func.attr in VIEWS else None
        return None

    def _report(self, written: ast.expr) -> None:
        if name := self._field(written):
            self._note(name)

    def _note(self, name: str) -> None:
        self.found.append((self.scope, name))

    def _store(self, target: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._store(element)
        elif isinstance(target, ast.Subscript):
            self._report(target.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        outer, self._aliases = self._aliases, dict(self._aliases)
        self._enter(node)
        self._aliases = outer

    visit_ClassDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._store(target)
            self._name(target, node.value)

    def _name(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._name(one, other)
        elif isinstance(target, ast.Name):
            self._aliases.pop(target.id, None)
            if shared := self._field(value):
                self._aliases[target.id] = shared

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        target = node.target
        if isinstance(target, ast.Subscript):
            self._report(target.value)
        elif self._field(target) in SEQUENCES:  # Other things have a position, too.
            self._report(target)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute):
            if function.attr.endswith("_") and not function.attr.startswith("_"):
                self._report(_whole(function.value))
            if self._kernel and function.attr.startswith(("store", "atomic")):
                self._kernel_store(node)
        elif isinstance(function, ast.Name) and function.id == "TableWrite":
            self._report(_whole(node.args[0]))
        for keyword in node.keywords:
            if keyword.arg == "out":
                self._report(keyword.value)

    def _kernel_store(self, node: ast.Call) -> None:
        """Triton writes through the pointer named first in the address."""
        pointer = node.args[0]
        while isinstance(pointer, ast.BinOp):
            pointer = pointer.left
        if isinstance(pointer, ast.Name) and pointer.id in FIELDS:
            self._note(pointer.id)


def writes_in(source: str, kernel: bool = False) -> list[tuple[str, str]]:
    check = WriterCheck(kernel)
    check.visit(parsed(source))
    return sorted(check.found)


def test_the_named_functions_alone_write_the_device_s_truth():
    """Every one of them, every field it may write, and nobody else."""
    found: dict[tuple[str, str], set[str]] = {}
    for name, source in package_sources().items():
        kernel = name.startswith("ops/") and name not in OWN_OUTPUTS
        for function, field in writes_in(source, kernel):
            found.setdefault((name, function), set()).add(field)
    assert found == WRITERS


def test_a_device_has_one_writer_of_each_field():
    for writers in (REFERENCE, TRITON):
        fields = [field for written in writers.values() for field in written]
        assert sorted(fields) == sorted(FIELDS - {"block_table"})


VERBS = frozenset(("commit", "publish", "write_tables"))


def calls_of(source: str) -> set[tuple[str, str]]:
    """Which functions call a method that is named like a verb."""
    return {
        (function.name, node.func.attr)
        for function in nodes_of(source)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in VERBS
    }


def imports_of(source: str) -> set[str]:
    """Which verbs a module takes from the operations of a step."""
    return {
        alias.name
        for node in nodes_of(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sametoken.ops.step")
        for alias in node.names
    } & VERBS


def test_the_step_alone_commits_and_publishes():
    """By ``StepOps``; what the host writes between steps, and in a warm-up, is its tables'."""
    calls = {}
    for name, source in package_sources().items():
        assert not imports_of(source) or name.startswith("ops/step/"), name
        if found := calls_of(source):
            calls[name] = found
    assert calls == {
        "runner/step.py": {("verify_and_propose", verb) for verb in ("commit", "publish")},
        "runner/runner.py": {("_apply", "write_tables")},
        "runner/logits_processing.py": {("warm_up", "write_tables")},
    }


@pytest.mark.parametrize(
    ("statement", "field"),
    [
        ("sequences.num_tokens[slots] = 1", "num_tokens"),
        ("self._sequences.num_computed[x.slots] += 1", "num_computed"),
        ("s.draft_ids[:, 0], other = a, b", "draft_ids"),
        ("s.num_drafts.zero_()", "num_drafts"),
        ("s.num_drafts -= rejected", "num_drafts"),
        ("s.token_ids[slot].copy_(row)", "token_ids"),
        ("s.token_ids[0].copy_(row)", "token_ids"),
        ("s.token_ids[slot, :n].copy_(row)", "token_ids"),
        ("s.token_ids.index_put_((a, b), c)", "token_ids"),
        ("TableWrite(s.token_ids[slot, : len(prompt)], prompt)", "token_ids"),
        ("s.block_table.view(-1)[at] = 7", "block_table"),
        ("table = s.block_table\ntable[slot] = 7", "block_table"),
        ("row = s.token_ids[2, 1:]\nrow.fill_(0)", "token_ids"),
        ("slots, held = x.slots, s.num_pending\nheld[slots] = 0", "num_pending"),
        ("torch.add(a, b, out=s.num_tokens)", "num_tokens"),
        ("tl.store(num_tokens + slot, value, mask)", "num_tokens"),
        ("tl.atomic_add(num_computed + slot, 1)", "num_computed"),
        ("copy = s.token_ids[slots, positions]\ncopy[is_draft] = drafts", None),
        ("draft_ids = torch.zeros(2)\ndraft_ids[sampling] = 1", None),
        ("tokens = s.num_tokens\ntokens = torch.zeros(2)\ntokens[0] = 1", None),
        ("length = s.num_tokens[slots] + 1", None),
        ("tl.store(staged_num_tokens + slot, value)", None),
        ("cache.position[slots] += 1", "position"),
        ("tl.store(num_pending + slot, left, live)", "num_pending"),
        ("self.position = 3", None),
    ],
)
def test_the_checker_finds_planted_writes(statement, field):
    body = statement.replace("\n", "\n    ")
    found = [name for _, name in writes_in(f"def f():\n    {body}", kernel=True)]
    assert found == ([field] if field else [])
