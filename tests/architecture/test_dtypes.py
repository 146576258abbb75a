"""Tensors name their dtype: torch's default is one of the whole process, and its user's."""

from __future__ import annotations

import ast

import pytest

from helpers.sources import nodes_of, package_sources

#: What has the default dtype unless it is told another; ``arange`` and ``randint`` make integers.
FACTORIES = frozenset(
    ("empty", "eye", "full", "linspace", "normal", "ones", "rand", "randn", "tensor", "zeros")
)
#: Rooms that compute in processes of their own, in whatever dtype they choose.
OTHERS = ("bench/", "train/")


def without_dtype(source: str) -> list[int]:
    """Lines of calls of torch's factories that name no dtype."""
    return [
        node.lineno
        for node in nodes_of(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
        and not any(keyword.arg in ("dtype", None) for keyword in node.keywords)
    ]


def test_every_tensor_names_its_dtype():
    found = {
        name: lines
        for name, source in package_sources().items()
        if not name.startswith(OTHERS) and (lines := without_dtype(source))
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.zeros(3)", True),
        ("x = f(torch.tensor([1.5], device=device))", True),
        ("torch.full((3,), 0.5, dtype=torch.float32)", False),
        ("torch.ones(3, **like)", False),
        ("x.new_zeros(3)", False),
    ],
)
def test_a_tensor_without_one_is_found(source, found):
    assert bool(without_dtype(source)) == found
