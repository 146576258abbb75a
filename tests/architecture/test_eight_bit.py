"""Weights in eight bits are made for draft heads alone: the target cannot get one."""

from __future__ import annotations

import ast
from pathlib import Path

import sametoken

PACKAGE = Path(sametoken.__file__).parent
# Where heads are loaded, and where what they take is counted.
MAKERS = {"drafters/quantized.py", "bench/memory.py"}
# Names by which such a weight is made or told apart.
NAMES = {"eight_bit", "EightBitWeight", "quantize"}


def names_in(source: str) -> set[str]:
    """Which of ``NAMES`` the code reads, as a name or of an object."""
    nodes = list(ast.walk(ast.parse(source)))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    imported = {
        alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return (attributes | imported) & NAMES


def test_the_checker_sees_every_way_to_make_one():
    assert names_in("weight = self.kernels.eight_bit(weight)") == {"eight_bit"}
    assert names_in("make = kernels.eight_bit") == {"eight_bit"}
    assert names_in("from sametoken.kernels.gemm.eight_bit import quantize as q") == {"quantize"}
    assert names_in("from sametoken.kernels.gemm import eight_bit") == {"eight_bit"}
    assert names_in("kernels.linear(x, weight)") == set()


def test_draft_heads_alone_are_quantized():
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if names_in(path.read_text(encoding="utf-8"))
    }
    assert {path for path in found if not path.startswith("kernels/")} == MAKERS
