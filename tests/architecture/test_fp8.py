"""Weights become fp8 for draft heads alone: a target has those of its checkpoint."""

from __future__ import annotations

import ast

import pytest

from helpers.sources import nodes_of, package_sources

# From the speculative config, through the one load of all heads, to the reader of weights.
MAKERS = {
    "drafters/heads.py",
    "models/experts.py",
    "models/heads/base.py",
    "models/heads/reader.py",
    "models/nemotron_h.py",
    "models/load/weights.py",
}
# Names by which such a weight is asked for, made or told apart.
NAMES = {"quantize_fp8", "Fp8Weight", "Fp8DeviceWeight", "quantize", "fp8"}


def names_in(source: str) -> set[str]:
    """Which of ``NAMES`` the code reads, as a name or of an object, imports or passes."""
    found = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.keyword | ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found & NAMES


def test_the_checker_sees_every_way_to_make_one():
    assert names_in("weight = weight.quantize_fp8()") == {"quantize_fp8"}
    assert names_in("make = weight.quantize_fp8") == {"quantize_fp8"}
    assert names_in("WeightReader(source, kernels, quantize_fp8=True)") == {"quantize_fp8"}
    assert names_in("from sametoken.ops.model.gemm.fp8 import quantize as q") == {"quantize"}
    assert names_in("from sametoken.ops.model.gemm import fp8") == {"fp8"}
    assert names_in("weight.matmul(x)") == set()


def test_draft_heads_alone_are_quantized():
    found = {name for name, source in package_sources().items() if names_in(source)}
    assert {name for name in found if not name.startswith("ops/")} == MAKERS


@pytest.mark.parametrize("module", ["experts", "nemotron_h"])
def test_a_mixture_of_experts_only_turns_it_off(module):
    values = [
        node.value.value
        for node in nodes_of(package_sources()[f"models/{module}.py"])
        if isinstance(node, ast.keyword) and node.arg == "quantize_fp8"
    ]
    assert {*values} == {False}
