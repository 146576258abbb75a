"""Runs draft heads alone: what they take from a target, rows of one slot, poisoned KV."""

from __future__ import annotations

import torch

from helpers.checkpoints import HIDDEN, VOCAB
from sametoken.kernels.interface import AttentionRows
from sametoken.kernels.reference import ReferenceKernels
from sametoken.state.kv_cache import KVCache

CPU = torch.device("cpu")
KERNELS = ReferenceKernels()
BLOCK_SIZE = 4
OPTIONS = {"kernels": KERNELS, "dtype": torch.float32, "device": CPU, "max_positions": 32}


class SharedTarget:
    """The two weights that a head may take from its target, packed and as matrices."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        generator = torch.Generator().manual_seed(99)
        self.embedding_matrix = torch.randn(VOCAB, hidden, generator=generator)
        self.head_matrix = torch.randn(VOCAB, hidden, generator=generator)
        self.embedding = KERNELS.pack(self.embedding_matrix)
        self.head = KERNELS.pack(self.head_matrix)

    def whole_head(self):
        return self.head


def rows_of_one_slot(first: int, count: int) -> AttentionRows:
    positions = torch.arange(first, first + count)
    table = torch.tensor([[2, 0, 3, 1], [4, 4, 4, 4]])
    kv_slots = table[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionRows(positions, torch.zeros_like(positions), kv_slots, table)


def empty_kv(head) -> KVCache:
    cache = KVCache.allocate(head.kv_spec, num_blocks=4, block_size=BLOCK_SIZE, device=CPU)
    cache.memory.fill_(float("nan"))
    return cache
