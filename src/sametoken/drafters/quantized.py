"""Draft heads whose matrices are in eight bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from sametoken.kernels.interface import Kernels
from sametoken.layers.linear import Linear
from sametoken.layers.sparse_moe import SparseMoE
from sametoken.models.eagle1 import Eagle1Head
from sametoken.models.eagle3 import Eagle3Head
from sametoken.models.mtp import MTPHead

Head = Eagle1Head | Eagle3Head | MTPHead


def in_eight_bits(head: Head, kernels: Kernels) -> Head:
    """A copy whose projections are in eight bits, that to logits included.

    Embeddings, norms, biases and a whole mixture of experts are shared with ``head``.

    Raises:
        UnsupportedError: the kernels have no products with such weights.
    """
    changed: Head = _with_projections(head)
    return replace(changed, lm_head=kernels.eight_bit(head.lm_head))


def _with_projections(part: Any) -> Any:
    """A copy whose projections are in eight bits; the part itself if it has none."""
    if isinstance(part, Linear):
        return replace(part, weight=part.kernels.eight_bit(part.weight))
    if isinstance(part, tuple):
        return tuple(_with_projections(one) for one in part)
    changes = {
        name: new for name, old in _inside(part) if (new := _with_projections(old)) is not old
    }
    return replace(part, **changes) if changes else part


def _inside(part: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of fields that may hold projections; a mixture of experts stays whole."""
    if is_dataclass(part) and not isinstance(part, SparseMoE):
        for field in fields(part):
            yield field.name, getattr(part, field.name)
