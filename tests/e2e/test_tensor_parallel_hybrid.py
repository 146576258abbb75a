"""The law for two ranks that divide a hybrid: its heads, its recurrent state, its experts.

Ranks are threads here, but for one test that has them as processes.
"""

from __future__ import annotations

import pytest

from helpers.checkpoints import write_checkpoint
from helpers.harness import request, requests_of
from helpers.hybrids import hybrid_config, hybrid_tensors, merged_experts, twin_config, twin_tensors
from helpers.nemotron import write_nemotron
from helpers.thread_ranks import engine_over_threads
from helpers.two_ranks import MAX_TOKENS, VOCAB, answer, config_of, drive, requests
from sametoken.engine.build import build_engine
from sametoken.scheduler import kept_states

SIZES = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 256,
}
NEMOTRON = {key: value for key, value in SIZES.items() if not key.startswith("linear")}
DRAFTS = {
    "plain": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_max": 3,
        "draft_limits": "fixed",
    },
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}
KINDS = ("dense", "experts")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    dense, twin = hybrid_config("qwen3_5", **SIZES), twin_config(**SIZES)
    experts = hybrid_config("qwen3_next", **SIZES)
    return {
        "dense": write_checkpoint(folder / "dense", dense, hybrid_tensors(dense, seed=4)),
        "experts": write_checkpoint(
            folder / "experts", experts, merged_experts(hybrid_tensors(experts, seed=3))
        ),
        "twin": write_checkpoint(folder / "twin", twin, twin_tensors(twin, seed=6)),
        "nemotron": write_nemotron(folder / "nemotron", seed=4, moe_latent_size=6, **NEMOTRON),
    }


def speculation(files, kind, method):
    if method == "self":
        drafts = {"method": "draft_model", "num_speculative_tokens": 3}
        return drafts | {"model": str(files[kind])}
    return DRAFTS[method]


@pytest.fixture(scope="module")
def truths(files):
    """Every request alone in its batch, plainly."""
    return {kind: answer(files[kind], max_num_seqs=1) for kind in (*KINDS, "nemotron")}


@pytest.mark.parametrize(
    ("kind", "method", "steps_in_flight", "max_num_seqs", "chunk"),
    [
        ("dense", "plain", 3, 3, 16),
        ("experts", "ngram", 1, 2, 16),
        ("dense", "mtp", 2, 6, 64),
        ("experts", "self", 2, 4, 32),
        ("nemotron", "ngram", 2, 6, 32),
        ("nemotron", "mtp", 3, 3, 16),
    ],
)
def test_the_same_tokens(files, truths, kind, method, steps_in_flight, max_num_seqs, chunk):
    answers = answer(
        files[kind],
        speculation(files, kind, method),
        steps_in_flight=steps_in_flight,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=chunk,
    )
    assert answers == truths[kind]
    assert (answers.offered > 0) == (method != "plain")


def test_scarce_memory_and_preemption_change_nothing(files, truths):
    drafts = speculation(files, "experts", "mtp")
    config = config_of(files["experts"], drafts, num_kv_blocks=9, max_num_seqs=6)
    with engine_over_threads(config) as (core, _):
        assert drive(core) == truths["experts"]
        assert core._runner.num_swaps


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_every_rank_starts_from_states_that_it_kept(files, method, monkeypatch):
    """Inside the windows of an answer, from which the next prompt goes on."""
    monkeypatch.setattr(kept_states, "INTERVAL", 1)
    prompt, cold = (*range(41),), {"max_num_seqs": 1, "enable_prefix_caching": False}
    options = {"steps_in_flight": 2, "max_num_seqs": 2}
    with engine_over_threads(config_of(files["dense"], DRAFTS[method], **options)) as (core, _):
        for num_hits in (0, 48, 48 + 64):
            items = [request(f"r{num_hits}", prompt, MAX_TOKENS)]
            answers = drive(core, items)
            assert answers == answer(files["dense"], None, items, **cold)
            assert core.scheduler.prefix_cache_hits == num_hits
            ((tokens, _),) = answers.values()
            prompt = (*prompt, *tokens, 3, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_is_the_target_is_always_right(files, kind):
    """It runs whole on rank 0, so its logits differ by rounding alone."""
    plain = [item for item in requests() if item.params.top_p == 1]
    answers = answer(files[kind], speculation(files, kind, "self"), plain)
    assert answers.accepted == answers.offered > 0


def test_so_is_a_module_that_is_its_target_s_twin(files):
    """Token 0 begins every prompt; every other request is sampled."""
    prompts = [(0, *range(i, i + length)) for i, length in enumerate((1, 15, 16, 31, 33))]
    items = requests_of(prompts, MAX_TOKENS, 0.0, 0.9)
    plain = answer(files["twin"], None, items, max_num_seqs=1)
    answers = answer(files["twin"], DRAFTS["mtp"], items, steps_in_flight=3)
    assert answers == plain
    assert answers.accepted == answers.offered > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_right_as_often_as_with_one_rank(files, kind):
    two = answer(files[kind], DRAFTS["mtp"])
    one = answer(files[kind], DRAFTS["mtp"], tensor_parallel_size=1)
    assert [tokens for tokens, _ in two.values()] == [tokens for tokens, _ in one.values()]
    assert (two.offered, two.accepted) == (one.offered, one.accepted)
    assert two.accepted > 0


def test_processes_say_the_same(files, truths):
    core = build_engine(config_of(files["experts"], DRAFTS["mtp"], steps_in_flight=2))
    answers = drive(core)
    assert answers == truths["experts"]
    assert answers.accepted > 0


def test_each_rank_has_its_heads_state_and_no_more(files):
    one = build_engine(config_of(files["dense"], DRAFTS["ngram"], tensor_parallel_size=1)).resolved
    with engine_over_threads(config_of(files["dense"], DRAFTS["ngram"])) as (core, _):
        assert 2 * core.resolved.recurrent_bytes == one.recurrent_bytes > 0
        slots = core._runner._inner.step.kv.slots
        assert sum(memory.nbytes for memory in slots) == core.resolved.recurrent_bytes
        assert core.resolved.num_kv_blocks >= one.num_kv_blocks
        kv, whole = core.resolved.request_memory, one.request_memory
        assert 2 * kv.kv_per_token == whole.kv_per_token
        assert 2 * kv.recurrent_state == whole.recurrent_state
        assert 2 * kv.pending == whole.pending > 0
