"""Cache memory of one model: paged by block, recurrent state by slot."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.ops.backend import LayerKV
from sametoken.ops.cache_types import LayerCache, PagedKV
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.model.recurrent.rule import STATE_STRIDE, Folded, LayerMemory
from sametoken.types.units import in_units


@dataclass(frozen=True, slots=True)
class ModelCache:
    """Cache memory of all layers.

    The last block and the last slot are reserved: padding rows and unassigned block table
    entries point to them.

    Attributes:
        layers: each layer's view of the memory, in the order of the model's declarations; None
            where a layer keeps nothing.
        blocks: tensors [n, num_blocks + 1, ...], one for each group of n equal declarations.
        slots: tensors [n, max_num_seqs + 1, ...], likewise.
        reserved_block: the block that no request owns.
        folded: the positions that recurrent layers have folded; None without such layers.
    """

    layers: tuple[LayerKV | LayerLatent | LayerMemory | None, ...]
    blocks: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    reserved_block: int
    folded: Folded | None

    @classmethod
    def allocate(
        cls,
        caches: Sequence[LayerCache],
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        num_drafts: int,
        device: torch.device,
    ) -> ModelCache:
        """Allocate memory for the layers' declarations; slots start at position 0.

        Args:
            caches: the declaration of each layer.
            num_blocks: without the reserved one.
            block_size: tokens per block.
            max_num_seqs: slots, without the reserved one.
            num_drafts: k, for which slots have room.
            device: where the memory is.
        """
        alike: dict[LayerCache, list[int]] = {}
        for index, cache in enumerate(caches):
            # A sliding window changes which KV is read, not which is stored.
            kept = replace(cache, window=None) if isinstance(cache, PagedKV) else cache
            alike.setdefault(kept, []).append(index)
        layers, blocks, slots = {}, [], []
        for kept, indices in alike.items():
            # Attention multiplies what it does not see by 0, so memory must hold finite values.
            paged = [
                _zeros((len(indices), num_blocks + 1, *shape), dtype, device)
                for shape, dtype in kept.block_shapes(block_size)
            ]
            by_slot = [
                _by_slot((len(indices), max_num_seqs + 1, *shape), dtype, device)
                for shape, dtype in kept.slot_shapes(num_drafts)
            ]
            # A layer that reads another's KV has none to swap.
            blocks += [tensor for tensor in paged if tensor.numel()]
            slots += by_slot
            for place, index in enumerate(indices):
                own = (tensor[place] for tensor in (*paged, *by_slot))
                layers[index] = caches[index].part(*own)
        folded = None
        if slots:
            counts = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
            (max_pending,) = {m.max_pending for m in layers.values() if isinstance(m, LayerMemory)}
            state_stride = 1 if num_drafts else STATE_STRIDE
            folded = Folded(counts, counts.clone(), max_pending, state_stride)
        parts = tuple(layers[index] for index in range(len(caches)))
        return cls(parts, tuple(blocks), tuple(slots), num_blocks, folded)

    def kv(self, index: int) -> LayerKV:
        """Keys and values of an attention layer."""
        layer = self.layers[index]
        assert isinstance(layer, LayerKV)
        return layer


def _by_slot(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``_zeros`` of [layers, slots, ...], in which every layer begins at a multiple of 16 bytes.

    Kernels that find a layer elsewhere have other sums, whatever the number of slots.
    """
    layers, slots, *own = shape
    slot_bytes, spare = math.prod(own) * dtype.itemsize, 0
    while (slots + spare) * slot_bytes % 16:
        spare += 1
    return _zeros((layers, slots + spare, *own), dtype, device)[:, :slots]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU, of pages that take no memory before they are written.

    Raises:
        MemoryError: the system has no room for them.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {in_units(num_bytes)} of a cache") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)
