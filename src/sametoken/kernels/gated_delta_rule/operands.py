"""What the kernels of one Gated DeltaNet layer read and write, by address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RawRows:
    """A pass's T rows as projected; rows of each part may lie apart.

    Attributes:
        qkv: [T, C], before the convolution.
        a, b: [T, Hv], gates.
    """

    qkv: Tensor
    a: Tensor
    b: Tensor

    def __post_init__(self) -> None:
        assert all(part.stride(1) == 1 for part in (self.qkv, self.a, self.b))
        assert self.qkv.dtype == self.a.dtype == self.b.dtype

    @property
    def strides(self) -> tuple[int, int, int]:
        """How far apart the rows of each part lie."""
        return self.qkv.stride(0), self.a.stride(0), self.b.stride(0)


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What the slots keep in one layer; attributes as those of ``RecurrentCache``, without L."""

    states: Tensor
    history: Tensor
    pending_qkv: Tensor
    pending_gates: Tensor

    def __post_init__(self) -> None:
        held = (self.states, self.history, self.pending_qkv, self.pending_gates)
        assert all(tensor.is_contiguous() for tensor in held)
        assert len({tensor.dtype for tensor in held[1:]}) == 1

    @property
    def max_pending(self) -> int:
        """k, rows that pending has room for."""
        return self.pending_qkv.shape[1]


def sizes(spec: Any) -> dict[str, int]:
    """Compile-time sizes of a layer (``state.recurrent.RecurrentSpec``)."""
    return {
        "HK": spec.num_key_heads,
        "HV": spec.num_value_heads,
        "DK": spec.key_dim,
        "DV": spec.value_dim,
        "K": spec.conv_kernel,
    }
