"""What drafters are given in steps of static shapes: the drafts and the KV of compact ones."""

from __future__ import annotations

import pytest
import torch

from helpers import forward
from helpers.checkpoints import VOCAB, write_llama
from helpers.drafting import Bench, requests_of
from helpers.head_files import HeadFiles
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.drafters.eagle import EagleDrafter


def load(directory, kind: str):
    """A target, and a head or a draft model for it."""
    if kind == "draft_model":
        other = write_llama(directory / "other", seed=1)
        return forward.load(write_llama(directory / "target")), forward.load(other)
    files = HeadFiles(directory, kind)
    return files.target, files.head()


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
