"""``commit`` alone writes what ``Sequences`` holds: nothing else could forget to.

A checker over the syntax trees of the package. Views of a field count as the field;
indexing by tensors makes a copy, which anyone may write.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sametoken

PACKAGE = Path(sametoken.__file__).parent
FIELDS = frozenset(
    ("num_tokens", "num_computed", "draft_ids", "num_drafts", "token_ids", "block_table")
)
WRITERS = ("state/commit.py", "kernels/commit/")
# Pointers named like the fields of ``Drafts``, which these kernels make.
OWN_OUTPUTS = ("kernels/ngram/triton.py",)
VIEWS = frozenset(("view", "flatten", "unsqueeze", "squeeze", "t", "transpose", "select", "narrow"))


def _is_view_index(index: ast.expr) -> bool:
    """Whether indexing by it may share memory: it has a slice, a number, or None."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(isinstance(part, ast.Slice | ast.Constant) for part in parts)


class WriterCheck(ast.NodeVisitor):
    """Line numbers and field names of stores into fields of ``Sequences``."""

    def __init__(self, kernel: bool = False) -> None:
        self.found: list[tuple[int, str]] = []
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

    def _report(self, node: ast.stmt | ast.expr, written: ast.expr) -> None:
        if name := self._field(written):
            self.found.append((node.lineno, name))

    def _store(self, node: ast.stmt, target: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._store(node, element)
        elif isinstance(target, ast.Subscript):
            self._report(node, target.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._aliases = self._aliases, dict(self._aliases)
        self.generic_visit(node)
        self._aliases = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._store(node, target)
            if isinstance(target, ast.Name):
                self._aliases.pop(target.id, None)
                if shared := self._field(node.value):
                    self._aliases[target.id] = shared

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        target = node.target
        self._report(node, target.value if isinstance(target, ast.Subscript) else target)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute):
            if function.attr.endswith("_") and not function.attr.startswith("_"):
                self._report(node, function.value)
            if self._kernel and function.attr.startswith(("store", "atomic")):
                self._kernel_store(node)
        for keyword in node.keywords:
            if keyword.arg == "out":
                self._report(node, keyword.value)

    def _kernel_store(self, node: ast.Call) -> None:
        """Triton writes through the pointer named first in the address."""
        pointer = node.args[0]
        while isinstance(pointer, ast.BinOp):
            pointer = pointer.left
        if isinstance(pointer, ast.Name) and pointer.id in FIELDS:
            self.found.append((node.lineno, pointer.id))


def writes_in(source: str, kernel: bool = False) -> list[tuple[int, str]]:
    check = WriterCheck(kernel)
    check.visit(ast.parse(source))
    return sorted(check.found)


def test_only_commit_writes_the_fields_of_sequences():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(WRITERS):
            continue
        kernel = name.startswith("kernels/") and name not in OWN_OUTPUTS
        found += [(name, *where) for where in writes_in(path.read_text(), kernel)]
    assert found == []


@pytest.mark.parametrize(
    ("statement", "field"),
    [
        ("sequences.num_tokens[slots] = 1", "num_tokens"),
        ("self._sequences.num_computed[x.slots] += 1", "num_computed"),
        ("s.draft_ids[:, 0], other = a, b", "draft_ids"),
        ("s.num_drafts.zero_()", "num_drafts"),
        ("s.num_drafts -= rejected", "num_drafts"),
        ("s.token_ids[slot].copy_(row)", None),
        ("s.token_ids[0].copy_(row)", "token_ids"),
        ("s.token_ids[slot, :n].copy_(row)", "token_ids"),
        ("s.token_ids.index_put_((a, b), c)", "token_ids"),
        ("s.block_table.view(-1)[at] = 7", "block_table"),
        ("table = s.block_table\ntable[slot] = 7", "block_table"),
        ("row = s.token_ids[2, 1:]\nrow.fill_(0)", "token_ids"),
        ("torch.add(a, b, out=s.num_tokens)", "num_tokens"),
        ("tl.store(num_tokens + slot, value, mask)", "num_tokens"),
        ("tl.atomic_add(num_computed + slot, 1)", "num_computed"),
        ("copy = s.token_ids[slots, positions]\ncopy[is_draft] = drafts", None),
        ("draft_ids = torch.zeros(2)\ndraft_ids[sampling] = 1", None),
        ("tokens = s.num_tokens\ntokens = torch.zeros(2)\ntokens[0] = 1", None),
        ("length = s.num_tokens[slots] + 1", None),
        ("tl.store(staged_num_tokens + slot, value)", None),
    ],
)
def test_the_checker_finds_planted_writes(statement, field):
    body = statement.replace("\n", "\n    ")
    found = [name for _, name in writes_in(f"def f():\n    {body}", kernel=True)]
    assert found == ([field] if field else [])


def test_the_writers_are_where_the_checker_thinks():
    """The exemption covers code that does write, or the check checks nothing."""
    source = (PACKAGE / "state/commit.py").read_text()
    assert {name for _, name in writes_in(source)} == FIELDS
    kernels = (PACKAGE / "kernels/commit").glob("*.py")
    written = {name for path in kernels for _, name in writes_in(path.read_text(), kernel=True)}
    assert written >= {"num_tokens", "num_computed", "token_ids", "draft_ids", "num_drafts"}
