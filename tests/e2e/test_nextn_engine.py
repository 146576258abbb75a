"""Engines over latent attention: drafters, and the module of the checkpoint."""

from __future__ import annotations

import pytest

from helpers.checkpoints import head_tensors, write_safeailab
from helpers.families import VOCAB
from helpers.harness import run
from helpers.latents import write_latent, write_nextn
from helpers.small_engines import build, mtp, plain, requests
from sametoken.errors import CheckpointError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe_lite"])
def checkpoint(request, tmp_path_factory):
    return write_nextn(tmp_path_factory.mktemp(request.param), request.param, seed=3)


@pytest.mark.parametrize(
    ("spec", "dtype", "steps"),
    [
        (mtp(3), "float32", "compact"),
        (mtp(4), "bfloat16", "static"),
        (NGRAM, "bfloat16", "compact"),
    ],
)
def test_drafts_change_no_token(checkpoint, spec, dtype, steps):
    core = build(checkpoint, spec, steps, dtype=dtype, steps_in_flight=2)
    assert core.resolved.attention_kernels == core.resolved.kernels
    drafted = run(core, requests())
    assert drafted.tokens == plain(checkpoint, dtype)
    assert drafted.offered > drafted.accepted


def test_an_eagle_3_head_changes_no_token(checkpoint, tmp_path):
    """Its own keys and values are paged beside the target's latents."""
    sizes = {"hidden_size": 32, "vocab_size": VOCAB}
    head = write_safeailab(tmp_path, head_tensors(**sizes), num_hidden_layers=1, **sizes)
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    drafted = run(build(checkpoint, spec), requests())
    assert drafted.tokens == plain(checkpoint)
    assert drafted.offered > drafted.accepted


def test_a_checkpoint_without_a_module_is_refused(tmp_path):
    path = write_latent(tmp_path, "deepseek_v2")
    with pytest.raises(CheckpointError, match="holds no NextN module"):
        build(path, mtp(2))
