"""Engines over latent attention: every drafter, prefixes, swaps, and a module of the checkpoint."""

from __future__ import annotations

from itertools import cycle

import pytest

from helpers.checkpoints import head_tensors, write_safeailab
from helpers.families import VOCAB
from helpers.harness import run, swapped_by
from helpers.latents import write_latent, write_nextn, write_twin
from helpers.small_engines import build, cached_by, mtp, plain, requests
from sametoken.errors import CheckpointError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe_lite"])
def checkpoint(request, tmp_path_factory):
    return write_nextn(tmp_path_factory.mktemp(request.param), request.param, seed=3)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return write_twin(tmp_path_factory.mktemp("twin"))


@pytest.mark.parametrize(
    ("spec", "dtype", "steps"),
    [
        (mtp(3), "float32", "compact"),
        (mtp(4), "bfloat16", "static"),
        (NGRAM, "bfloat16", "compact"),
    ],
)
def test_drafts_change_no_token(checkpoint, spec, dtype, steps):
    drafted = run(build(checkpoint, spec, steps, dtype=dtype, steps_in_flight=2), requests())
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


@pytest.mark.parametrize(("k", "steps"), zip((1, 2, 3, 5, 8), cycle(("compact", "static"))))
def test_a_module_that_is_its_target_s_twin_is_always_accepted(twin, k, steps):
    """Through chunks and steps in flight, by greedy requests and sampled ones."""
    drafted = run(build(twin, mtp(k), steps, steps_in_flight=1 + k % 3), requests())
    assert drafted.tokens == plain(twin)
    assert drafted.accepted == drafted.offered > 0


def test_preemption_takes_latents_along(twin, monkeypatch):
    core = build(twin, mtp(3), num_kv_blocks=8, max_model_len=40)
    swapped = swapped_by(core, monkeypatch)
    drafted = run(core, requests())
    assert swapped, "nothing was preempted"
    assert drafted.tokens == plain(twin)
    assert drafted.accepted == drafted.offered > 0


def test_a_cached_prefix_changes_no_token(twin):
    core = build(twin, mtp(3), enable_prefix_caching=True)
    assert run(core, requests()).tokens == plain(twin)
    cached = cached_by(core)
    warm = run(core, requests())
    assert warm.tokens == plain(twin)
    assert warm.accepted == warm.offered > 0
    assert max(cached) >= 16


@pytest.mark.parametrize("method", ["deepseek_mtp", "nextn"])
def test_other_names_of_the_method_work(twin, method):
    core = build(twin, mtp(2, method=method))
    assert core.resolved.config.speculative_config.method == "mtp"
    assert core.resolved.attention_kernels == core.resolved.kernels


def test_a_checkpoint_without_a_module_is_refused(tmp_path):
    path = write_latent(tmp_path, "deepseek_v2")
    with pytest.raises(CheckpointError, match="holds no NextN module"):
        build(path, mtp(2))
