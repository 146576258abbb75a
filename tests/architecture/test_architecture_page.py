"""Pages on the source are true: picture, rooms and path of the architecture, sizes, names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from helpers.sources import PACKAGE, nodes_of, package_sources, parsed
from sametoken.engine.resolve import DEVICE_DEFAULTS

ROOT = PACKAGE.parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SCHEDULING = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
NAMES = ("architecture", "files", "glossary", "invariants", "scheduling", "adding-a*")
PAGES = [page for name in NAMES for page in sorted((ROOT / "docs").glob(f"{name}.md"))]
MOST_LINES = 3500

#: A stop of the path: its function, its files, its lines.
STOP = re.compile(r"^\| \d+ \| .* \| `([\w.]+)` \| ((?:`[\w/]+\.py`(?:, )?)+) \| (\d+) \|$", re.M)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
#: Paths of pages are below one of these folders.
FOLDERS = (ROOT, PACKAGE, PACKAGE / "serving" / "http", ROOT / "tests" / "gpu")


def imports() -> dict[str, set[str]]:
    """By room, a folder or file of the package, the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for path, source in package_sources().items():
        room = path.partition("/")[0].removesuffix(".py")
        if room.startswith("__"):
            continue
        nodes = nodes_of(source)
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        others = {name.split(".")[1] for name in modules if name.startswith("sametoken.")}
        found.setdefault(room, set()).update(others - {room})
    return found


def reduced(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The arrows of a graph without cycles that do not follow from others."""

    def reached(room: str) -> set[str]:
        return graph[room].union(*map(reached, graph[room]))

    return {
        (room, other)
        for room, others in graph.items()
        for other in others
        if not any(other in reached(between) for between in others)
    }


def drawn(page: str) -> list[tuple[str, str]]:
    arrows = re.findall(r"^  (\w+) --> ([\w &]+)$", page, re.MULTILINE)
    return [(source, target) for source, targets in arrows for target in targets.split(" & ")]


def names_of(path: Path) -> set[str]:
    """Identifiers of a Python file, and strings that could be one, such as keys of a config."""
    found = {path.stem}
    for node in nodes_of(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            found.add(str(node.value))
    return found


def lines_of(files: str) -> int:
    paths = [PACKAGE / name for name in re.findall(r"[\w/]+\.py", files)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_picture_is_that_of_the_imports():
    assert len(drawn(PAGE)) == len(set(drawn(PAGE)))
    assert set(drawn(PAGE)) == reduced(imports())


def test_every_room_is_found_once():
    rows = re.findall(r"^\| [^|]+ \| ([^|]*) \|$", PAGE.partition("## The step")[0], re.MULTILINE)
    rooms = [name for row in rows for name in CODE.findall(row)]
    assert sorted(rooms) == sorted(imports())


def test_a_token_takes_ten_stops_and_few_lines():
    stops = STOP.findall(PAGE)
    assert 0 < len(stops) <= 10
    assert sum(lines_of(files) for _, files, _ in stops) <= MOST_LINES


@pytest.mark.parametrize(("function", "files", "lines"), STOP.findall(PAGE))
def test_every_stop_is_there_and_as_long_as_it_is_called(function, files, lines):
    assert abs(lines_of(files) - int(lines)) <= max(20, int(lines) // 10)
    found = [PACKAGE / name for name in re.findall(r"[\w/]+\.py", files)]
    assert any(_defines(path, function) for path in found), function


def _defines(path: Path, function: str) -> bool:
    scope: ast.AST | None = parsed(path.read_text(encoding="utf-8"))
    for name in function.split("."):
        inside = ast.iter_child_nodes(scope) if scope else ()
        scope = next((node for node in inside if getattr(node, "name", "") == name), None)
    return scope is not None


def test_the_sizes_are_those_of_the_devices():
    """Of what has a number in the table."""
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|$", SCHEDULING, re.MULTILINE)
    assert {name: int(size) for name, size, _ in rows} == DEVICE_DEFAULTS["cpu"]
    assert {name: int(size) for name, _, size in rows} == DEVICE_DEFAULTS["cuda"]


def missing_names(page: str, known: set[str]) -> list[str]:
    """Files that are not there, and identifiers that no Python file has."""
    missing = []
    for code in CODE.findall(page):
        if re.fullmatch(r"[\w/*]+\.(py|c|md|toml)", code):
            if not any(any(folder.glob(code)) for folder in FOLDERS):
                missing.append(code)
        elif re.fullmatch(r"[\w.]+(\(.*\))?", code) and not code.startswith("test_"):
            name = code.partition("(")[0].strip(".")
            if not set(re.split(r"\.", name)) <= known:
                missing.append(code)
    return missing


@pytest.fixture(scope="module")
def known() -> set[str]:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    folders = {path.name for root in (PACKAGE, ROOT / "tests") for path in root.rglob("*/")}
    kernels = " ".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.c"))
    return folders.union(*map(names_of, files), re.findall(r"\w+", kernels)) | {"sametoken"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page, known):
    assert missing_names(page.read_text(encoding="utf-8"), known) == []


def test_what_is_not_there_is_found(known):
    text = "`Decoder.forward`, `models/llama.py`, `ops/nowhere.py`, `Decoder.no_such_method()`"
    assert missing_names(text, known) == ["ops/nowhere.py", "Decoder.no_such_method()"]
    assert ("a", "c") not in reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()})
