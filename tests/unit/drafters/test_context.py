"""What drafters are given in steps of static shapes: the drafts and the KV of compact ones."""

from __future__ import annotations

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
from helpers.drafting import CPU, MAX_LEN, Bench, requests_of
from helpers.hybrids import FULL, hybrid_config, hybrid_tensors
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.drafters.eagle import EagleDrafter
from sametoken.models.heads.eagle import Eagle1Checkpoint
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.loader import load_model
from sametoken.ops.reference import ReferenceKernels

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
    target = load_model(write_llama(directory / "target"), **OPTIONS).keeping(aux_layers)
    if kind == "draft_model":
        return target, load_model(write_llama(directory / "other", seed=1), **OPTIONS)
    if kind == "eagle":
        head = write_eagle1(directory / "head", eagle1_tensors())
        return target, Eagle1Checkpoint(head).load(target, **OPTIONS)
    head = write_speculators(directory / "head", head_tensors())
    return target, Eagle3Checkpoint(head).load(target, **OPTIONS)


def make_bench(target, model, kind: str, **options) -> Bench:
    bench = Bench(target, **options)
    make = DraftModelDrafter if kind == "draft_model" else EagleDrafter
    bench.drafter = make(model, bench.allocate(model.caches), bench.k, bench.coupling)
    return bench


def told(bench: Bench, num_steps: int) -> list:
    """Of each request in each step its slot, its drafts, and the drafter's KV of what is true."""
    found = []

    def check(context, drafts):
        (cache,) = bench.drafter.kv_caches
        for b, slot in requests_of(context):
            kv = bench.cached(cache, slot, int(context.end[b]))
            assert not kv.isnan().any()
            found.append((slot, drafts.draft_ids[b, : int(drafts.num_drafts[b])].tolist(), kv))

    bench.run(num_steps, VOCAB, check)
    return found


@pytest.mark.parametrize(
    ("kind", "k", "temperature"),
    [("mtp", 4, 0.8), ("eagle", 1, 0.0), ("eagle3", 3, 0.8), ("draft_model", 3, 0.0)],
)
def test_drafts_and_kv_are_those_of_compact_steps(tmp_path, kind, k, temperature):
    """To the bit, through chunks, rejected drafts, slots taken up again and padding."""
    target, model = load(tmp_path, kind)
    options = {"k": k, "seed": k, "temperature": temperature}
    plain, *others = (
        told(make_bench(target, model, kind, steps=steps, **options), 8)
        for steps in ("compact", "static", "kernels")
    )
    assert any(drafts for _, drafts, _ in plain)
    for other in others:
        for ours, theirs in zip(plain, other, strict=True):
            assert ours[:2] == theirs[:2]
            assert torch.equal(ours[2], theirs[2])
