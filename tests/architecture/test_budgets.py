"""Code stays small: functions, parameter lists and files have budgets."""

from __future__ import annotations

import ast
from functools import cache

from helpers.sources import PACKAGE, nodes_of, package_sources

MAX_STATEMENTS = 40
MAX_PARAMETERS = 8
MAX_LINES = 450

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def functions() -> list[tuple[str, Function]]:
    found = []
    for name, source in package_sources().items():
        nodes = nodes_of(source)
        found += [(f"{name}:{n.lineno} {n.name}", n) for n in nodes if isinstance(n, Function)]
    return found


def num_statements(function: Function) -> int:
    """Statements of the body at every depth; a docstring is not one."""
    inside = [n for n in ast.walk(function) if isinstance(n, ast.stmt) and n is not function]
    return len(inside) - (ast.get_docstring(function) is not None)


def num_parameters(function: Function) -> int:
    """All parameters but ``self`` and ``cls``."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    packed = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return len([a for a in named if a.arg not in ("self", "cls")]) + len(packed)


def test_functions_are_short():
    long = {name: n for name, f in functions() if (n := num_statements(f)) > MAX_STATEMENTS}
    assert long == {}


def test_parameter_lists_are_short():
    """Except of kernels, which take pointers, strides and sizes one by one."""
    wide = {
        name: n
        for name, f in functions()
        if (n := num_parameters(f)) > MAX_PARAMETERS and not name.startswith("ops/")
    }
    assert wide == {}


def test_files_are_short(capsys):
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h")]
    lines = {
        path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in files
    }
    with capsys.disabled():
        print(f"\nsametoken: {sum(lines.values())} lines in {len(lines)} files")  # noqa: T201
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_the_counters_count():
    source = "def f(self, a, *b, c=1, **d):\n    '''Doc.'''\n    if a:\n        x = 1\n    return x"
    (function,) = ast.parse(source).body
    assert num_statements(function) == 3
    assert num_parameters(function) == 4
