"""Source files, read and parsed once in a process: many tests look at all of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import sametoken

PACKAGE = Path(sametoken.__file__).parent


@cache
def package_sources() -> dict[str, str]:
    """The text of each Python file of the package, by its path there."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in files
    }


@cache
def parsed(source: str) -> ast.Module:
    """The syntax tree; it is shared, nobody changes it."""
    return ast.parse(source)


class ScopedVisitor(ast.NodeVisitor):
    """Knows the function or class that it is in."""

    def __init__(self) -> None:
        self._names: list[str] = []

    @property
    def scope(self) -> str:
        return ".".join(self._names)

    def _enter(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    visit_ClassDef = _enter
    visit_FunctionDef = _enter


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """All nodes of the tree, as ``ast.walk`` gives them."""
    return list(ast.walk(parsed(source)))
