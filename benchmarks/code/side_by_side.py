"""Our code beside nano-vllm's and mini-sglang's, as a Markdown table.

Only the package is counted, without tests, scripts and examples. ``codebases.json`` lists what no
program can find: the functions between a prompt and its token, the files of a dense model and of
attention, and the names of a request's lengths. A listed name that a checkout lacks is an error.
Only checkouts that are named have a column.
"""

from __future__ import annotations

import argparse
import ast
import json
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from statistics import median, quantiles
from typing import Any

SPECIFICATIONS = Path(__file__).with_name("codebases.json")
SUFFIXES = (".py", ".c", ".cpp", ".cu", ".cuh", ".h")
#: Functions that make an object: what they store is a first value, not a change.
MAKERS = ("__init__", "__post_init__", "__setstate__")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Codebase:
    """A checkout, and its entry in ``codebases.json``."""

    name: str
    checkout: Path
    specification: dict[str, Any]

    @cached_property
    def files(self) -> dict[str, str]:
        root = self.checkout / self.specification["package"]
        found = sorted(root.rglob("*.py"))
        return {path.relative_to(root).as_posix(): path.read_text() for path in found}

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {path: ast.parse(text) for path, text in self.files.items()}

    def in_engine(self, path: str) -> bool:
        """Whether a file is of the engine: no server, command line or benchmark."""
        return not path.startswith(tuple(self.specification["beside_engine"]))

    def sizes(self, paths: Iterable[str]) -> list[int]:
        """Lines of each file, and of each file in a folder."""
        found: list[Path] = []
        for path in paths:
            whole = self.checkout / self.specification["package"] / path
            if not whole.exists():
                raise SystemExit(f"{self.name}: there is no {path}")
            found += whole.rglob("*") if whole.is_dir() else [whole]
        return [count_lines(path) for path in found if path.suffix in SUFFIXES]


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def named_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Functions of a module by qualified name; inner ones belong to the function around them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from named_functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, Function):
            yield prefix + node.name, node
        else:
            yield from named_functions(node, prefix)


def length_of(function: Function) -> int:
    """Lines from ``def`` to the end, docstring and comments included."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def is_typed(function: Function) -> bool:
    """Whether all parameters and the result have a type; a constructor's result needs none."""
    a = function.args
    parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    given = all(p.annotation for p in parameters if p.arg not in ("self", "cls"))
    return given and (function.returns is not None or function.name == "__init__")


def num_comments(text: str) -> int:
    tokens = tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def stops(code: Codebase, device: str) -> dict[str, list[int]]:
    """Lines of each function between a prompt and its token, by file; ``"*"`` is a whole file."""
    names: dict[str, set[str]] = {}
    for part in code.specification["paths"].get(device, ()):
        for path, some in code.specification["stops"][part].items():
            names.setdefault(path, set()).update(some)
    return {path: stops_in(code, path, some) for path, some in names.items()}


def stops_in(code: Codebase, path: str, names: set[str]) -> list[int]:
    if names == {"*"}:
        return code.sizes([path])
    tree = code.trees.get(path, ast.Module([], []))
    found = {name: f for name, f in named_functions(tree) if name in names}
    if missing := names - found.keys():
        raise SystemExit(f"{code.name}: {path} has no {', '.join(sorted(missing))}")
    return list(map(length_of, found.values()))


class LengthWrites(ast.NodeVisitor):
    """Whether a function changes a length of a request.

    It assigns to an attribute of such a name, to elements of it, also by a local name for it,
    calls a method of it that ends in ``_``, or is a kernel that stores through such a pointer.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._aliases: set[str] = set()
        self.found = False

    def _is_length(self, node: ast.expr, *, element: bool = False) -> bool:
        while isinstance(node, ast.Subscript):
            node, element = node.value, True
        if isinstance(node, ast.Name):
            return element and node.id in self._aliases
        return isinstance(node, ast.Attribute) and node.attr in self._names

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else ()
            for one, other in zip_longest(target.elts, values):
                self._assign(one, other)
        elif isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
            self._aliases |= {target.id} if value.attr in self._names else set()
        self.found |= self._is_length(target)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        self._assign(node.target, None)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        method = node.func
        if not isinstance(method, ast.Attribute):
            return
        if isinstance(method.value, ast.Name) and method.value.id == "tl":
            pointer = node.args[0] if method.attr in ("store", "atomic_add") else None
            while isinstance(pointer, ast.BinOp):
                pointer = pointer.left
            self.found |= isinstance(pointer, ast.Name) and pointer.id in self._names
        elif method.attr.endswith("_") and not method.attr.startswith("_"):
            self.found |= self._is_length(method.value, element=True)


def length_writers(code: Codebase) -> list[tuple[str, str]]:
    """Files and functions of the engine that change a length of a request."""
    found = []
    engine = {path: tree for path, tree in code.trees.items() if code.in_engine(path)}
    for path in engine.keys() - set(code.specification["other_lengths"]):
        for name, function in named_functions(engine[path]):
            writes = LengthWrites(code.specification["lengths"])
            writes.visit(function)
            if writes.found and function.name not in MAKERS:
                found.append((path, name))
    return sorted(found)


def column(code: Codebase) -> list[tuple[str, str]]:
    given, nodes = code.specification, chain(*map(ast.walk, code.trees.values()))
    functions = [node for node in nodes if isinstance(node, Function)]
    sizes = [length_of(function) for function in functions]
    longest = max(functions, key=length_of)
    lines = {path: len(text.splitlines()) for path, text in code.files.items()}
    engine = [count for path, count in lines.items() if code.in_engine(path)]
    total, writers = sum(lines.values()), length_writers(code)
    tests = sum(count_lines(path) for path in (code.checkout / "tests").rglob("*.py"))
    comments = 100 * sum(map(num_comments, code.files.values())) / total

    def share(some: Iterable[object]) -> str:
        return f"{100 * sum(map(bool, some)) / len(functions):.1f} %"

    def path_in(device: str) -> str:
        files = stops(code, device).values()
        counts = f"{sum(map(sum, files)):,} / {sum(map(len, files))} / {len(files)}"
        return counts if files else "does not run"

    def listed(name: str) -> str:
        files = code.sizes(given[name])
        return f"{len(files)} / {sum(files):,}"

    return [
        ("Python files / lines", f"{len(lines)} / {total:,}"),
        ("of these the engine", f"{len(engine)} / {sum(engine):,}"),
        ("C, C++ and CUDA lines", f"{sum(code.sizes(['.'])) - total:,}"),
        ("function lines, median / p90", f"{median(sizes):g} / {quantiles(sizes, n=10)[-1]:.0f}"),
        ("longest function", f"{length_of(longest)} (`{longest.name}`)"),
        ("functions over 50 lines", share(size > 50 for size in sizes)),
        ("functions with all types", share(map(is_typed, functions))),
        ("functions with a docstring", share(map(ast.get_docstring, functions))),
        ("comments per 100 lines", f"{comments:.1f}"),
        ("one token on a GPU: lines / functions / files", path_in("gpu")),
        ("one token on a CPU, in PyTorch: lines / functions / files", path_in("cpu")),
        ("who changes a length: functions / files", f"{len(writers)} / {len(dict(writers))}"),
        ("Qwen3's own file: lines", f"{code.sizes(given['dense_model'])[0]}"),
        ("Qwen3 and what it is made of: files / lines", listed("dense_model")),
        ("attention: files / lines", listed("attention")),
        ("lines of tests per line of Python", f"{tests / total:.2f}"),
    ]


def table(codes: list[Codebase]) -> str:
    rows = [["", *(code.name for code in codes)], ["---"] * (len(codes) + 1)]
    for measured in zip(*map(column, codes), strict=True):
        rows.append([measured[0][0], *(value for _, value in measured)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str] | None = None) -> None:
    known = json.loads(SPECIFICATIONS.read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    for name in known:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help="a checkout")
    parser.add_argument("--details", action="store_true", help="also where lines and writers are")
    chosen = vars(parser.parse_args(arguments))
    checkouts = {name: chosen[name.replace("-", "_")] for name in known}
    codes = [Codebase(name, path, known[name]) for name, path in checkouts.items() if path]
    if not codes:
        parser.error("no checkout is named: add one, as in --ours .")
    print(table(codes))
    for code in codes if chosen["details"] else ():
        for device in code.specification["paths"]:
            folders: Counter[str] = Counter()
            for path, lines in stops(code, device).items():
                folders[path.partition("/")[0]] += sum(lines)
            print(f"\n{code.name}, lines on a {device}: {dict(folders.most_common())}")
        print(f"{code.name}, writers: {length_writers(code)}")


if __name__ == "__main__":
    main()
