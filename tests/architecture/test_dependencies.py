"""Versions of dependencies: those that the tests run with are among those that are accepted."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def accepted() -> list[Requirement]:
    """Of the package and of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for lines in lists for line in lines]


def constraints() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text("utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, re.MULTILINE))


def test_the_versions_that_the_tests_run_with_are_accepted():
    pinned = constraints()
    refused = [str(one) for one in accepted() if pinned.get(one.name, "0") not in one.specifier]
    assert refused == []
