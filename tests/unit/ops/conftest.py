"""Paged KV scenes for kernel tests: random content, NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from helpers import poisoned as memory
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV


@dataclass(frozen=True)
class Scene:
    """KV of several slots under one block table."""

    shape: AttentionShape
    kv: LayerKV
    block_table: Tensor

    def rows(self, slots: Sequence[int], positions: Sequence[int]) -> AttentionRows:
        slot, position = torch.tensor(slots).long(), torch.tensor(positions).long()
        block_size = self.kv.keys.shape[2]
        blocks = self.block_table[slot, position // block_size]
        kv_slots = blocks * block_size + position % block_size
        return AttentionRows(position, slot, kv_slots, self.block_table)


def paged(
    shape: AttentionShape, history: Tensor, lengths: Sequence[int], block_size: int, seed: int
) -> Scene:
    """Lay out the first ``lengths[s]`` positions of ``history[:, s]`` in shuffled blocks.

    ``history`` is [2, slots, positions, kv_heads, head_dim]; all other KV memory is NaN.
    """
    _, num_slots, num_positions, kv_heads, dim = history.shape
    max_blocks = -(-num_positions // block_size)
    order = torch.randperm(
        num_slots * max_blocks + 1, generator=torch.Generator().manual_seed(seed)
    )
    table = order[: num_slots * max_blocks].view(num_slots, max_blocks)
    memory = torch.full(
        (2, len(order), kv_heads, block_size, dim), float("nan"), dtype=history.dtype
    )
    for slot, length in enumerate(lengths):
        position = torch.arange(length)
        blocks, offsets = table[slot, position // block_size], position % block_size
        memory[:, blocks, :, offsets] = history[:, slot, :length].transpose(0, 1)
    return Scene(shape, LayerKV(memory[0], memory[1]), table)


@pytest.fixture(scope="session")
def make_scene() -> Callable[..., Scene]:
    return paged


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Start with one thread, and restore torch's number at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    with memory.poisoned_memory():
        yield
