"""The syntax of source files, parsed once in a process: many tests look at all of them."""

from __future__ import annotations

import ast
from functools import cache


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
