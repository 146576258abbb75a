"""Engines of Nemotron-H: the same tokens with every drafter, whatever is reused or preempted.

Of the other hybrids of Mamba-2, too.
"""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from helpers import small_engines
from helpers.families import write_family
from helpers.forward import load
from helpers.harness import ScriptedDrafter, Shape, request, run, swapped_by
from helpers.harness import build as put_together
from helpers.nemotron import nemotron_config, write_nemotron, write_twin
from helpers.small_engines import MAX_TOKENS, PROMPTS, cached_by, mtp, plain, requests
from sametoken.ops.dispatch import CHOICE
from sametoken.scheduler import kept_states

# Room for all drafts of an n-gram.
build = partial(small_engines.build, max_num_batched_tokens=96)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_nemotron(tmp_path_factory.mktemp("dense"), seed=4, moe_latent_size=6)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return write_twin(tmp_path_factory.mktemp("twin"), seed=6)


@pytest.fixture(scope="module", params=["nemotron", "granite_hybrid", "bamba", "falcon_h1"])
def hybrid(request, tmp_path_factory):
    """Of any family of them; the others have no module."""
    if request.param == "nemotron":
        return request.getfixturevalue("dense")
    return write_family(tmp_path_factory.mktemp(request.param), request.param, seed=2)


NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 64,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


@pytest.mark.parametrize(
    ("spec", "steps", "dtype"),
    [
        (NGRAM, "compact", "float32"),
        (NGRAM, "static", "bfloat16"),
        (mtp(1), "static", "float32"),
        (mtp(5), "compact", "bfloat16"),
        (mtp(8), "static", "float32"),
    ],
    ids=["ngram", "ngram bf16", "mtp 1", "mtp 5 bf16", "mtp 8"],
)
def test_no_drafter_changes_a_token(dense, spec, steps, dtype):
    drafted = run(build(dense, spec, steps, dtype=dtype), requests())
    assert drafted.tokens == plain(dense, dtype)
    assert drafted.offered > 0


@pytest.mark.parametrize(
    ("script", "dtype"),
    [("right", torch.float32), ("wrong", torch.float32), ("mixed", torch.bfloat16)],
)
def test_adversarial_drafts_change_no_token(hybrid, script, dtype):
    model = load(hybrid, dtype=dtype)
    shape = Shape(prefix_caching=False, cache_emitted=False, max_model_len=64)
    items = [request(f"r{i}", p, max_tokens=MAX_TOKENS) for i, p in enumerate(PROMPTS)]
    truth = run(put_together(model, shape), items).tokens
    by_prompt = {tuple(prompt): truth[f"r{i}"] for i, prompt in enumerate(PROMPTS)}
    core = put_together(
        model,
        shape,
        make_drafter=lambda parts: ScriptedDrafter(parts, script),
        oracle=lambda admitted: by_prompt[tuple(admitted.prompt_token_ids)],
    )
    drafted = run(core, items)
    assert drafted.tokens == truth
    assert (drafted.accepted > 0) == (script != "wrong")


@pytest.mark.parametrize(("chunk", "k", "steps_in_flight"), [(8, 5, 1), (16, 3, 2), (8, 5, 3)])
def test_a_module_that_is_its_target_s_twin_is_always_accepted(twin, steps_in_flight, chunk, k):
    """Through chunk borders and steps in flight, by greedy requests and sampled ones."""
    core = build(twin, mtp(k), steps_in_flight=steps_in_flight, prefill_chunk_size=chunk)
    drafted = run(core, requests())
    assert drafted.tokens == plain(twin)
    assert drafted.accepted == drafted.offered > 0


def test_a_request_may_end_at_the_longest_length(twin):
    """Drafts near ``max_model_len`` are cut to what still fits, and are right."""
    items = [request("r", [0, 5, 3, 2], max_tokens=44), request("s", [0, 2], max_tokens=46)]
    ran = run(build(twin, mtp(8, method="nemotron_h_mtp"), max_model_len=48), items)
    assert ran.tokens == run(build(twin, max_model_len=48), items).tokens
    assert [len(tokens) for tokens in ran.tokens.values()] == [44, 46]
    assert ran.accepted == ran.offered > 0


@pytest.mark.parametrize("spec", [None, mtp(3)], ids=["plain", "mtp"])
def test_preempted_requests_go_on_from_their_state(twin, spec, monkeypatch):
    core = build(twin, spec, num_kv_blocks=8, max_model_len=40)
    swapped = swapped_by(core, monkeypatch)
    assert run(core, requests()).tokens == plain(twin)
    assert swapped, "nothing was preempted"


def test_so_do_those_of_any_hybrid(hybrid, monkeypatch):
    core = build(hybrid, NGRAM, num_kv_blocks=6, max_model_len=40)
    swapped = swapped_by(core, monkeypatch)
    assert run(core, requests()).tokens == plain(hybrid)
    assert swapped, "nothing was preempted"


def test_a_kept_state_serves_the_next_turn(hybrid, monkeypatch):
    """A prompt that goes on from an answer begins at the state that was kept near its end."""
    monkeypatch.setattr(kept_states, "INTERVAL", 2)
    options = {"block_size": 4, "max_model_len": 96, "kv_cache_memory_bytes": 2**22}
    core = build(hybrid, NGRAM, **options)
    told = run(core, [request("a", range(17), max_tokens=8)]).tokens["a"]
    longer, cached = request("b", [*range(17), *told, 3, 1], max_tokens=8), cached_by(core)
    warm = run(core, [longer]).tokens
    assert max(cached) >= 16
    assert warm == run(build(hybrid, **options), [longer]).tokens


def test_the_reference_says_the_same_with_drafts(dense, monkeypatch):
    monkeypatch.setenv(CHOICE, "reference")
    items = requests()[:2]
    assert run(build(dense, mtp(3)), items).tokens == run(build(dense), items).tokens


def test_a_published_config_alone_makes_a_drafting_engine(tmp_path):
    """Lightning's keys over small sizes; infinity stands in JSON as Python writes it."""
    config = nemotron_config("MEM*E", time_step_limit=[0.0, float("inf")], chunk_size=128)
    config |= {"dtype": "bfloat16", "num_hidden_layers": 5, "mamba_ssm_cache_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafted = run(build(tmp_path, mtp(5), load_format="dummy"), requests()[:2])
    assert drafted.offered > 0
    assert drafted.tokens == run(build(tmp_path, load_format="dummy"), requests()[:2]).tokens
