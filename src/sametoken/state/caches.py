"""What the layers of one model keep: paged by block, recurrent state by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.ops.backend import LayerKV
from sametoken.ops.cache_types import (
    LayerCache,
    LayerLatent,
    PagedKV,
)
from sametoken.ops.model.recurrent.rule import (
    Folded,
    LayerMemory,
)


@dataclass(frozen=True, slots=True)
class ModelCache:
    """Memory of all layers. The last block is reserved, and so is the last slot.

    Padding rows and unassigned table entries point there.

    Attributes:
        layers: what each layer has of it, in the order of the model's declarations.
        blocks: tensors [n, num_blocks + 1, ...], each of n layers that declare the same.
        slots: tensors [n, max_num_seqs + 1, ...], likewise.
        reserved_block: the block that no request owns.
        folded: how far recurrent layers are folded; None without any.
    """

    layers: tuple[LayerKV | LayerLatent | LayerMemory, ...]
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
        """Room for what layers declare; slots start at position 0.

        Args:
            caches: what each layer keeps.
            num_blocks: without the reserved one.
            block_size: tokens of a block.
            max_num_seqs: slots, without the reserved one.
            num_drafts: k, pending rows of a slot.
            device: where the memory is.
        """
        alike: dict[LayerCache, list[int]] = {}
        for index, cache in enumerate(caches):
            # A window changes what is read, not what is kept.
            kept = replace(cache, window=None) if isinstance(cache, PagedKV) else cache
            alike.setdefault(kept, []).append(index)
        layers, blocks, slots = {}, [], []
        for kept, indices in alike.items():
            paged = [
                torch.empty(len(indices), num_blocks + 1, *shape, dtype=dtype, device=device)
                for shape, dtype in kept.block_shapes(block_size)
            ]
            by_slot = [
                torch.zeros(len(indices), max_num_seqs + 1, *shape, dtype=dtype, device=device)
                for shape, dtype in kept.slot_shapes(num_drafts)
            ]
            blocks += paged
            slots += by_slot
            for place, index in enumerate(indices):
                layers[index] = kept.part(*(tensor[place] for tensor in (*paged, *by_slot)))
        folded = None
        if slots:
            counts = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
            folded = Folded(counts, counts.clone(), num_drafts)
        parts = tuple(layers[index] for index in range(len(caches)))
        return cls(parts, tuple(blocks), tuple(slots), num_blocks, folded)

    def kv(self, index: int) -> LayerKV:
        """Keys and values of an attention layer."""
        layer = self.layers[index]
        assert isinstance(layer, LayerKV)
        return layer

    @property
    def slots_nbytes(self) -> int:
        """Bytes of all slots, without their blocks."""
        return sum(tensor.nbytes for tensor in self.slots)
