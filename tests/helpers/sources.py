"""The syntax of source files, parsed once in a process: many tests look at all of them."""

from __future__ import annotations

import ast
from functools import cache


@cache
def parsed(source: str) -> ast.Module:
    """The syntax tree; it is shared, nobody changes it."""
    return ast.parse(source)


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """All nodes of the tree, as ``ast.walk`` gives them."""
    return list(ast.walk(parsed(source)))
