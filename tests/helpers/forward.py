"""Run a model's forward pass over hand-assigned blocks of poisoned KV."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.recurrent import poison
from sametoken.models.base import HiddenStates
from sametoken.models.decoder import Decoder
from sametoken.models.loader import load_model
from sametoken.ops.backend import AttentionRows, KeptRows, Kernels, RowRuns
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.step.reference import rows_at
from sametoken.ops.triton import TritonKernels
from sametoken.state.caches import ModelCache
from sametoken.state.sequences import Sequences

CPU = torch.device("cpu")
#: Of ``logits_of``.
TOKENS = [3, 40, 17, 5, 5, 21, 0]


def load(
    path, kernels: Kernels | None = None, aux_layers: tuple[int, ...] = (), **options: Any
) -> Decoder:
    """A checkpoint's model on the CPU: by the reference in fp32, unless others are given."""
    defaults = {"dtype": torch.float32, "device": CPU, "max_positions": 128}
    target = load_model(path, kernels=kernels or ReferenceKernels(), **defaults | options)
    return target.keeping(aux_layers)


def kept_at(rows: AttentionRows, index: list[int]) -> KeptRows:
    """Rows of a pass, in any order, each a run of its own."""
    places = torch.tensor(index, dtype=torch.int64)
    where = rows.positions[places], rows.slots[places], rows.block_table
    return KeptRows(places, *where, RowRuns.even(len(index), 1))


class Bench:
    """KV full of NaN and one sequence per slot, its blocks scattered in memory."""

    def __init__(self, model, *, num_slots: int = 1, max_len: int = 128, block_size: int = 4):
        per_slot = -(-max_len // block_size)
        num_blocks = num_slots * per_slot
        self.model = model
        cache = ModelCache.allocate(
            model.caches,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=num_slots,
            num_drafts=0,
            device=CPU,
        )
        self.kv = poison(cache)
        self.sequences = Sequences.allocate(
            max_num_seqs=num_slots,
            max_len=max_len,
            num_drafts=0,
            block_size=block_size,
            reserved_block=self.kv.reserved_block,
            device=CPU,
        )
        blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self.sequences.block_table[:num_slots] = blocks.view(num_slots, per_slot)

    def run(
        self, token_ids: list[int], start: int, slot: int = 0, kept: list[int] | None = None
    ) -> HiddenStates:
        """The tokens at positions ``start`` and on of a slot; ``kept`` are rows of them."""
        positions = torch.arange(start, start + len(token_ids))
        rows = self.rows_at(torch.full_like(positions, slot), positions)
        wanted = None if kept is None else kept_at(rows, kept)
        return self.model.forward(torch.tensor(token_ids), rows, self.kv, wanted)

    def rows_at(self, slots: torch.Tensor, positions: torch.Tensor) -> AttentionRows:
        return rows_at(self.sequences, slots, positions, None, None)

    def logits(self, token_ids: list[int], chunks: list[int]) -> torch.Tensor:
        """Logits of every position, computed in chunks of the given lengths and a rest."""
        out, start = [], 0
        for length in [*chunks, len(token_ids)]:
            chunk = token_ids[start : start + length]
            if chunk:
                out.append(self.model.compute_logits(self.run(chunk, start).last))
                start += len(chunk)
        return torch.cat(out)

    def continue_greedily(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Greedy continuation, one token at a time after one prefill."""
        token_ids, produced, start = list(token_ids), [], 0
        while len(produced) < num_tokens:
            hidden = self.run(token_ids[start:], start).last[-1:]
            start = len(token_ids)
            produced.append(int(self.model.compute_logits(hidden).argmax()))
            token_ids.append(produced[-1])
        return produced


def logits_of(model, *chunks: int) -> torch.Tensor:
    """Logits of ``TOKENS``, in chunks of the given lengths and a rest."""
    return Bench(model, max_len=16).logits(TOKENS, list(chunks))


class OneRun(Bench):
    """All rows of a pass are one slot's run, as kernels on a GPU need it."""

    def rows_at(self, slots: torch.Tensor, positions: torch.Tensor) -> AttentionRows:
        count = len(slots)
        runs = RowRuns(1, count, torch.tensor([0, count]), 0, 0)
        return replace(super().rows_at(slots, positions), runs=runs)


def require_logits_by_kernels(path, prompt: list[int], chunks: list[int]) -> None:
    """A GPU's kernels, under the interpreter: near the reference, and chunks change no bit."""
    if torch.cuda.is_available():
        pytest.skip("runs on the CPU, under the interpreter")
    ours, theirs = (load(path, kernels) for kernels in (TritonKernels(GemmTable()), None))
    found, wanted = (OneRun(one, max_len=16).logits(prompt, []) for one in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(OneRun(ours, max_len=16).logits(prompt, chunks), found)
