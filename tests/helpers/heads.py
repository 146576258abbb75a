"""Runs draft heads alone: what they take from a target, rows of one slot, poisoned KV."""

from __future__ import annotations

import torch

from helpers.checkpoints import HIDDEN, VOCAB
from helpers.recurrent import poison
from helpers.rows import ragged_rows
from sametoken.ops.backend import AttentionRows, Kernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.state.caches import ModelCache

CPU = torch.device("cpu")
KERNELS = ReferenceKernels()
BLOCK_SIZE = 4
OPTIONS = {"kernels": KERNELS, "dtype": torch.float32, "device": CPU, "max_positions": 32}


class SharedTarget:
    """The two weights that a head may take from its target, packed and as matrices."""

    def __init__(self, hidden: int = HIDDEN, kernels: Kernels = KERNELS) -> None:
        generator = torch.Generator().manual_seed(99)
        self.embedding_matrix = torch.randn(VOCAB, hidden, generator=generator)
        self.head_matrix = torch.randn(VOCAB, hidden, generator=generator)
        self.embedding = kernels.pack(self.embedding_matrix.clone())
        self.head = kernels.pack(self.head_matrix.clone())

    def whole_head(self):
        return self.head


def rows_of_one_slot(first: int, count: int) -> AttentionRows:
    return ragged_rows([(0, first, count)], torch.tensor([[2, 0, 3, 1], [4, 4, 4, 4]]), BLOCK_SIZE)


def empty_kv(head) -> ModelCache:
    cache = ModelCache.allocate(
        head.caches, num_blocks=4, block_size=BLOCK_SIZE, max_num_seqs=1, num_drafts=0, device=CPU
    )
    return poison(cache)


def require_kept_rows_alone(head, vocab_size: int, hidden_size: int) -> None:
    """Rows that are kept have the states of a pass that keeps all, and the same KV is written."""
    generator = torch.Generator().manual_seed(6)
    token_ids = torch.randint(vocab_size, (7,), generator=generator)
    hidden = torch.randn(7, hidden_size, generator=generator)
    whole_kv = empty_kv(head)
    whole = head.forward(token_ids, hidden.clone(), rows_of_one_slot(0, 7), whole_kv)
    for places in ([6], [4, 0, 5], []):
        kept, kv = torch.tensor(places, dtype=torch.int64), empty_kv(head)
        states = head.forward(token_ids, hidden.clone(), rows_of_one_slot(0, 7), kv, kept)
        assert torch.equal(states.last, whole.last[kept])
        assert torch.equal(states.feedback, whole.feedback[kept])
        for memory, whole_memory in zip(kv.blocks, whole_kv.blocks, strict=True):
            assert torch.equal(memory.nan_to_num(7.0), whole_memory.nan_to_num(7.0))
