"""Paged KV memory of one model, addressed by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.kernels.interface import LayerKV
from sametoken.state.recurrent import RecurrentCache


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one model needs per block of KV memory."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers, keys and values."""
        elements = 2 * self.num_layers * self.num_kv_heads * block_size * self.head_dim
        return elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """KV of all layers: one tensor [num_layers, 2, num_blocks, kv_heads, block_size, head_dim].

    The last block is reserved: padding rows and unassigned table entries point there. Layers
    with recurrent state have none of it; theirs is in ``recurrent``, by slot.
    """

    memory: Tensor
    recurrent: RecurrentCache | None = None

    @classmethod
    def allocate(
        cls,
        spec: KVSpec,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        recurrent: RecurrentCache | None = None,
    ) -> KVCache:
        """Room for ``num_blocks`` blocks and the reserved one."""
        shape = (spec.num_layers, 2, num_blocks + 1, spec.num_kv_heads, block_size, spec.head_dim)
        return cls(torch.empty(shape, dtype=spec.dtype, device=device), recurrent)

    @property
    def reserved_block(self) -> int:
        """The block that no request owns."""
        return self.memory.shape[2] - 1

    def layer(self, index: int) -> LayerKV:
        """Keys and values of one layer."""
        return LayerKV(self.memory[index, 0], self.memory[index, 1])

    def read_blocks(self, block_ids: Tensor) -> Tensor:
        """A copy of the given blocks over all layers, in that order."""
        return self.memory.index_select(2, block_ids)

    def write_blocks(self, block_ids: Tensor, saved: Tensor) -> None:
        """Put blocks read by ``read_blocks`` back at other block ids."""
        self.memory.index_copy_(2, block_ids, saved)
