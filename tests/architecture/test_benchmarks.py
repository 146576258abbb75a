"""What the scripts of benchmarks take from the package is there: most run on a GPU alone."""

from __future__ import annotations

import ast
from pathlib import Path

from helpers.sources import PACKAGE, nodes_of, parsed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def names_of(module: str) -> set[str] | None:
    """What a module of the package defines or imports, and its submodules; None: there is none."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not source.is_file():
        return None
    names = {one.stem for one in path.glob("*")} if path.is_dir() else set()
    for node in parsed(source.read_text(encoding="utf-8")).body:
        for one in ast.walk(node) if isinstance(node, ast.If | ast.Try) else (node,):
            if isinstance(one, ast.FunctionDef | ast.ClassDef):
                names.add(one.name)
            elif isinstance(one, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in one.names}
            elif isinstance(one, ast.Assign | ast.AnnAssign):
                names |= {part.id for part in ast.walk(one) if isinstance(part, ast.Name)}
    return names


def missing(source: str) -> list[str]:
    """The imports from the package that it does not have."""
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sametoken":
            names = names_of(str(node.module))
            wanted = (alias.name for alias in node.names)
            found += [f"{node.module}.{name}" for name in wanted if name not in (names or ())]
        elif isinstance(node, ast.Import):
            wanted = (alias.name for alias in node.names if alias.name.startswith("sametoken."))
            found += [name for name in wanted if names_of(name) is None]
    return found


def test_benchmarks_import_what_is_there():
    for path in sorted(BENCHMARKS.rglob("*.py")):
        assert missing(path.read_text(encoding="utf-8")) == [], path


def test_what_is_gone_is_found():
    source = "import sametoken.nothing\nfrom sametoken.ops.model.moe_triton import _Activation"
    assert missing(source) == ["sametoken.nothing", "sametoken.ops.model.moe_triton._Activation"]
