"""Tests are where one looks for them, and every test that a document names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from helpers.sources import PACKAGE, nodes_of

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
INVARIANTS = ROOT / "docs" / "invariants.md"
NOT_MIRRORED = ("e2e", "security", "gpu", "architecture", "mutants", "regression")
NAMED_FILE = re.compile(r"tests/[\w/]+\.py")
NAMED_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def misplaced(paths: list[str], packages: set[str]) -> list[str]:
    """Test files in a directory that is neither a mirror of the package nor one of the others."""
    wrong = []
    for path in paths:
        top, *middle = Path(path).parent.parts or ("",)
        mirrored = top == "unit" and "/".join(middle) in packages
        if not (mirrored or (top in NOT_MIRRORED and not middle)):
            wrong.append(path)
    return wrong


def names_in(path: Path) -> set[str]:
    """Functions and classes that pytest could collect, and names bound to test cases."""
    found = set()
    for node in nodes_of(path.read_text()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.add(node.targets[0].id)
    return found


def broken_references(text: str) -> list[str]:
    """References to test files, and to tests in them, that lead nowhere."""
    broken = [name for name in NAMED_FILE.findall(text) if not (ROOT / name).is_file()]
    for name, test in NAMED_TEST.findall(text):
        if (ROOT / name).is_file() and test not in names_in(ROOT / name):
            broken.append(f"{name}::{test}")
    return broken


def test_every_test_file_mirrors_the_package():
    packages = {
        path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")
    }
    packages = {"" if package == "." else package for package in packages}
    paths = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    assert misplaced(paths, packages) == []


def test_every_test_that_the_invariants_name_exists():
    text = INVARIANTS.read_text(encoding="utf-8")
    assert NAMED_TEST.findall(text), "the invariants name no test"
    assert broken_references(text) == []


def test_every_test_that_a_docstring_or_document_names_exists():
    broken = {}
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    for path in sources:
        if found := broken_references(path.read_text(encoding="utf-8")):
            broken[path.relative_to(ROOT).as_posix()] = found
    assert broken == {}


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("unit/engine/test_core.py", True),
        ("unit/test_config.py", True),
        ("e2e/test_same_tokens.py", True),
        ("unit/nowhere/test_core.py", False),
        ("engine/test_core.py", False),
        ("test_core.py", False),
    ],
)
def test_misplaced_files_are_found(path, right):
    assert (misplaced([path], {"", "engine"}) == []) == right


def test_broken_references_are_found():
    here = "tests/architecture/test_mirror.py"
    assert broken_references(f"{here}::test_broken_references_are_found") == []
    assert broken_references(f"{here}::test_gone") == [f"{here}::test_gone"]
    gone = "tests/unit/" + "test_gone.py"
    assert broken_references(f"see {gone}") == [gone]
