"""What a test process froze stays frozen: each search for garbage would cost every later test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from helpers.sources import nodes_of

TESTS = Path(__file__).parents[1]


def thawing(source: str) -> list[str]:
    """Functions that call ``gc.unfreeze`` and do not freeze again; "" for the module's own code.

    tests/conftest.py freezes what was imported and collected, once. Where it is thawed, each full
    search for garbage looks at it again, for up to 1.8 s.
    """
    scopes = dict.fromkeys(nodes_of(source), "")
    for scope in nodes_of(source):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            scopes |= dict.fromkeys(ast.walk(scope), scope.name)
    last: dict[str, tuple[int, str]] = {}
    for node, scope in scopes.items():
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if name in ("freeze", "unfreeze"):
            last[scope] = max(last.get(scope, (0, "")), (node.lineno, name))
    return sorted(scope for scope, (_, name) in last.items() if name == "unfreeze")


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("def one():\n    gc.unfreeze()", ["one"]),
        ("async def one():\n    gc.freeze()\n    gc.unfreeze()", ["one"]),
        ("from gc import unfreeze\nunfreeze()", [""]),
        ("def one():\n    gc.unfreeze()\ndef two():\n    gc.freeze()", ["one"]),
        ("def one():\n    gc.unfreeze()\n    gc.collect()\n    gc.freeze()", []),
        ("def one():\n    gc.collect()", []),
    ],
)
def test_the_checker_sees_a_thaw(code, wanted):
    assert thawing(code) == wanted


def test_no_test_leaves_the_process_thawed():
    found = {str(path): thawing(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: functions for path, functions in found.items() if functions} == {}
