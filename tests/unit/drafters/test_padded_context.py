"""The padded layout of a captured step: the drafts and the KV of the compact one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.checkpoints import (
    VOCAB,
    eagle1_tensors,
    head_tensors,
    write_checkpoint,
    write_eagle1,
    write_llama,
    write_speculators,
)
from helpers.drafting import CPU, MAX_LEN, Bench
from helpers.hybrids import FULL, hybrid_config, hybrid_tensors
from sametoken.drafters import chain, padded
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.drafters.eagle import EagleDrafter
from sametoken.drafters.padded import PaddedDraftContext
from sametoken.kernels.draft_rows import reference
from sametoken.kernels.draft_rows import triton as in_one_launch
from sametoken.kernels.reference import ReferenceKernels
from sametoken.models.base import HiddenStates
from sametoken.models.eagle1_checkpoint import Eagle1Checkpoint
from sametoken.models.eagle3_checkpoint import Eagle3Checkpoint
from sametoken.models.loader import load_model
from sametoken.models.mtp_checkpoint import MTPCheckpoint

OPTIONS = {
    "kernels": ReferenceKernels(),
    "dtype": torch.float32,
    "device": CPU,
    "max_positions": MAX_LEN,
}


def load(directory, kind: str):
    """A target, and a head or a draft model for it."""
    if kind == "mtp":
        config = hybrid_config("qwen3_5", num_hidden_layers=2, layer_types=[FULL] * 2)
        write_checkpoint(directory, config, hybrid_tensors(config))
        target = load_model(directory, **OPTIONS)
        return target, MTPCheckpoint(directory).load(target, **OPTIONS)
    aux_layers = (1, 2, 4) if kind == "eagle3" else ()
    target = load_model(write_llama(directory / "target"), aux_layers=aux_layers, **OPTIONS)
    if kind == "draft_model":
        return target, load_model(write_llama(directory / "other", seed=1), **OPTIONS)
    if kind == "eagle":
        head = write_eagle1(directory / "head", eagle1_tensors())
        return target, Eagle1Checkpoint(head).load(target, **OPTIONS)
    head = write_speculators(directory / "head", head_tensors())
    return target, Eagle3Checkpoint(head).load(target, **OPTIONS)


def in_padded_layout(context) -> PaddedDraftContext:
    """The same step with as many flat rows for each plan row, and padding; NaN in dead rows."""
    x, reserved = context.x, context._sequences.reserved_slot
    batch, rows = len(x.slots) + 2, int((x.row_starts[1:] - x.row_starts[:-1]).max()) + 1
    starts = torch.arange(batch + 1) * rows
    offset = torch.arange(len(x.row_owner)) - x.row_starts[x.row_owner]
    flat = starts[x.row_owner] + offset

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        padded_rows = tensor.new_full((batch * rows, tensor.shape[1]), torch.nan)
        padded_rows[flat] = tensor
        return padded_rows

    def extended(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat((tensor, tensor.new_full((2,), value)))

    inputs = dataclasses.replace(
        x,
        slots=extended(x.slots, reserved),
        samples=extended(x.samples, 0),
        row_starts=starts,
        token_ids=torch.zeros(batch * rows, dtype=torch.int64),
    )
    hidden = HiddenStates(spread(context.hidden.last), spread(context.hidden.auxiliary))
    lengths = (extended(length, 0) for length in (context.start, context.end, context.num_tokens))
    return PaddedDraftContext(inputs, hidden, *lengths, context._sequences)


class Both:
    """Two drafters that must agree, each over KV of its own: one per layout."""

    def __init__(self, compact, padded_one) -> None:
        self.compact, self.padded = compact, padded_one
        self.kv_caches = (*compact.kv_caches, *padded_one.kv_caches)
        self.lookahead_slots = compact.lookahead_slots
        self.lookahead_tokens = compact.lookahead_tokens

    def propose(self, context):
        drafts = self.compact.propose(context)
        found = self.padded.propose(in_padded_layout(context))
        batch = len(context.slots)
        assert torch.equal(found.num_drafts[:batch], drafts.num_drafts)
        assert not found.num_drafts[batch:].any()
        sampled = context.samples
        assert torch.equal(found.draft_ids[:batch][sampled], drafts.draft_ids[sampled])
        return drafts


@pytest.mark.parametrize("kernels", [reference, in_one_launch], ids=["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "k", "temperature"),
    [("mtp", 4, 0.8), ("eagle", 1, 0.0), ("eagle3", 3, 0.8), ("draft_model", 3, 0.0)],
)
def test_both_layouts_draft_alike(tmp_path, monkeypatch, kind, k, temperature, kernels):
    """To the bit, through chunks, rejected drafts, slots taken up again and padding."""
    for module in (padded, chain):
        monkeypatch.setattr(module, "select_draft_rows", lambda device: kernels)
    target, model = load(tmp_path, kind)
    bench = Bench(target, k, seed=k, temperature=temperature)
    make = DraftModelDrafter if kind == "draft_model" else EagleDrafter
    bench.drafter = Both(
        *(make(model, bench.allocate(model.kv_spec), k, bench.coupling) for _ in range(2))
    )

    def check(context, drafts):
        compact, other = bench.drafter.kv_caches
        for slot, end in zip(context.slots.tolist(), context.end.tolist(), strict=True):
            kv = bench.cached(compact, slot, end)
            assert not kv.isnan().any()
            assert torch.equal(bench.cached(other, slot, end), kv)

    bench.run(12, VOCAB, check)
