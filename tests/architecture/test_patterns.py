"""Regular expressions mean the same in every Python that is supported."""

from __future__ import annotations

import ast
import re

import pytest

from helpers.sources import nodes_of, package_sources

_ESCAPED, _CLASS = re.compile(r"\\.", re.DOTALL), re.compile(r"\[[^\]]*\]")
_GROUP = re.compile(r"\((?P<inside>[^()]*)\)(?P<possessive>(?:[*+?]|\{[\d,]+\})\+)?")


def text_of(node: ast.AST) -> str:
    """The text of a literal, with a character for what an f-string inserts."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "x"


def errs_before_3_11_5(pattern: str) -> bool:
    """Whether it repeats a group possessively that is not atomic (issue 106052 of CPython)."""
    text = _CLASS.sub("x", _ESCAPED.sub("x", pattern))
    while group := _GROUP.search(text):
        if group["possessive"] and group["inside"].startswith("?:"):
            return True
        text = f"{text[: group.start()]}x{text[group.end() :]}"
    return False


def test_groups_that_are_repeated_possessively_are_atomic():
    literals = {
        text_of(node)
        for source in package_sources().values()
        for node in nodes_of(source)
        if isinstance(node, ast.JoinedStr | ast.Constant)
    }
    assert sum("(?>" in text for text in literals) > 5
    assert [text for text in literals if errs_before_3_11_5(text)] == []


@pytest.mark.parametrize(
    ("pattern", "errs"),
    [
        (r'"(?:[^"\\]|\\.)*+"', True),
        (r'"(?>[^"\\]|\\.)*+"', False),
        (r"(?:a(?:b|(c))?+)", True),
        (r"(?:ab){2,3}+", True),
        (r"(?:ab)*\+[(?:]*+\)*+(?P<comma>,)?+", False),
    ],
)
def test_which_err(pattern, errs):
    assert errs_before_3_11_5(pattern) is errs
