"""Engines over latent attention: every drafter, prefixes, swaps, and a module of the checkpoint."""

from __future__ import annotations

from functools import lru_cache
from itertools import cycle

import pytest

from helpers.checkpoints import head_tensors, write_safeailab
from helpers.families import VOCAB
from helpers.harness import request, run
from helpers.latents import write_latent, write_nextn, write_twin
from helpers.static_steps import in_steps
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.errors import CheckpointError

# Lengths around the edges of chunks, which are of 8; tokens 0 and 1 begin every prompt.
PROMPTS = [[0, 1, 4], [0, 1, 6, 5, 3, 5, 8, 9], list(range(17)), [0, 1, 7, 7, 7], [0, 1, 7] * 8]
MAX_TOKENS = 14
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe_lite"])
def checkpoint(request, tmp_path_factory):
    return write_nextn(tmp_path_factory.mktemp(request.param), request.param, seed=3)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return write_twin(tmp_path_factory.mktemp("twin"))


def build(path, spec=None, steps: str = "compact", **options):
    options = {
        "model": str(path),
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "prefill_chunk_size": 8,
        "block_size": 8,
        "max_model_len": 48,
        "kv_cache_memory_bytes": 2**20,
        "speculative_config": spec,
    } | options
    core = build_engine(EngineConfig.from_options(**options))
    core._runner = in_steps(core._runner, steps)
    return core


def mtp(k: int) -> dict:
    return {"method": "mtp", "num_speculative_tokens": k}


def requests():
    """Every other one is sampled."""
    return [
        request(f"r{i}", prompt, max_tokens=MAX_TOKENS, seed=i, temperature=0.9 * (i % 2))
        for i, prompt in enumerate(PROMPTS)
    ]


@lru_cache
def plain(path, dtype: str = "float32") -> dict[str, list[int]]:
    return run(build(path, dtype=dtype), requests()).tokens


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


@pytest.mark.parametrize(("k", "steps"), zip(range(1, 9), cycle(("compact", "static"))))
def test_a_module_that_is_its_target_s_twin_is_always_accepted(twin, k, steps):
    """Through chunks and steps in flight, by greedy requests and sampled ones."""
    drafted = run(build(twin, mtp(k), steps, steps_in_flight=1 + k % 3), requests())
    assert drafted.tokens == plain(twin)
    assert drafted.accepted == drafted.offered > 0


def test_preemption_takes_latents_along(twin, monkeypatch):
    core = build(twin, mtp(3), num_kv_blocks=8, max_model_len=40)
    swap, swapped = core._runner.swap, []
    move_out = swap.move_out
    monkeypatch.setattr(swap, "move_out", lambda p: (swapped.extend(p.swap_outs), move_out(p)))
    drafted = run(core, requests())
    assert swapped, "nothing was preempted"
    assert drafted.tokens == plain(twin)
    assert drafted.accepted == drafted.offered > 0


def test_a_cached_prefix_changes_no_token(twin):
    core = build(twin, mtp(3), enable_prefix_caching=True)
    assert run(core, requests()).tokens == plain(twin)
    step, cached = core.step, []

    def watched():
        updates = step()
        cached.extend(update.num_cached for update in updates)
        return updates

    core.step = watched
    warm = run(core, requests())
    assert warm.tokens == plain(twin)
    assert warm.accepted == warm.offered > 0
    assert max(cached) >= 16


@pytest.mark.parametrize("method", ["deepseek_mtp", "nextn"])
def test_other_names_of_the_method_work(twin, method):
    core = build(twin, {"method": method, "num_speculative_tokens": 2})
    assert core.resolved.config.speculative_config.method == "mtp"
    assert core.resolved.attention_kernels == core.resolved.kernels


def test_a_checkpoint_without_a_module_is_refused(tmp_path):
    path = write_latent(tmp_path, "deepseek_v2")
    with pytest.raises(CheckpointError, match="holds no NextN module"):
        build(path, mtp(2))
