"""Sources of training text: public data sets and installed packages, no test set."""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

STDLIB = "stdlib"
# MBPP is one file; its authors evaluate on these tasks.
MBPP_TEST_TASKS = range(11, 511)


def read_rows(folder: Path, name: str) -> list[dict]:
    """Read the JSON lines of a file in the folder or below it."""
    path = next(iter(sorted(folder.rglob(name))), None)
    if path is None:
        sys.exit(f"{folder} holds no {name}: benchmarks/training/README.md says what it is")
    # splitlines would also split at separators that JSON allows in strings.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def mbpp_rows(folder: Path) -> list[dict]:
    rows = [r for r in read_rows(folder, "mbpp.jsonl") if r["task_id"] not in MBPP_TEST_TASKS]
    return [row | {"text": row["text"].strip(), "code": untabbed(row["code"])} for row in rows]


def untabbed(code: str) -> str:
    return code.replace("\r\n", "\n").replace("\t", "    ").strip()


def instructed(row: dict, instance: dict) -> str:
    """Render a task of Self-Instruct with one of its inputs."""
    given = instance["input"]
    return row["instruction"] + ("\n\n" + given if given.strip() else "")


def fenced(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


def exercise(row: dict) -> str:
    """Render an exercise of Exercism."""
    return f"{row['instructions'].strip()}\n\nComplete this Python code:\n\n{fenced(row['stub'])}"


def package_folder(name: str) -> Path | None:
    """Return the folder of a package; print a note and return None if it is not installed."""
    if name == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        print(f"{name} is not installed and left out", file=sys.stderr)
        return None
    return Path(spec.submodule_search_locations[0])


def package_sources(name: str) -> Iterator[str]:
    """Yield every Python file of a package; the standard library without its tests."""
    folder = package_folder(name)
    for path in sorted(folder.rglob("*.py")) if folder else ():
        parts = path.relative_to(folder).parts
        outside = {"site-packages", "dist-packages", "test", "tests"} if name == STDLIB else set()
        if outside.isdisjoint(parts):
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
