"""The law for two ranks: any drafter, chunks, batch and steps in flight, the same tokens.

They divide heads, recurrent state and experts, and share what there is one of. Ranks are threads
here, except in one test; tests/unit/distributed/test_ranks.py has them as processes.
"""

from __future__ import annotations

import json
from functools import cache, partial

import pytest
import torch

from helpers.checkpoints import (
    eagle1_tensors,
    head_tensors,
    write_checkpoint,
    write_eagle1,
    write_llama,
    write_safeailab,
)
from helpers.dense_modules import write_module
from helpers.families import write_family
from helpers.gguf_files import write_gguf
from helpers.harness import request, requests_of
from helpers.hybrids import hybrid_config, hybrid_tensors, merged_experts, twin_config, twin_tensors
from helpers.latents import write_nextn
from helpers.nemotron import write_nemotron
from helpers.recorded import RecordedLogits
from helpers.state_heads import MEDUSA, MLP, write_circle, write_circle_head
from helpers.thread_ranks import engine_over_threads
from helpers.two_ranks import MAX_TOKENS, VOCAB, answer, config_of, drive, requests
from sametoken.engine.build import build_engine
from sametoken.ops.cache_types import bytes_per_block
from sametoken.scheduler import kept_states

SIZES = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA = SIZES | {"num_hidden_layers": 4, "intermediate_size": 32}
HYBRID = SIZES | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
ONE_KV_HEAD = {"num_key_value_heads": 1}
#: Two ranks do not divide it.
ODD = {"intermediate_size": 33}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
DRAFTS = {
    "plain": None,
    "ngram": NGRAM,
    "long": NGRAM | {"num_speculative_tokens": 8, "draft_limits": "fixed"},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    one_layer = LLAMA | {"num_hidden_layers": 1}
    headless = head_tensors(full_vocab=True, **LLAMA)
    del headless["lm_head.weight"]
    dense, twin = hybrid_config("qwen3_5", **HYBRID), twin_config(**HYBRID)
    experts = hybrid_config("qwen3_next", **HYBRID | ONE_KV_HEAD)
    one_group = SIZES | {"mamba_n_groups": 1}
    (folder / "map.json").write_text(json.dumps(list(range(0, VOCAB, 2))))
    nemotron = SIZES | ONE_KV_HEAD | {"moe_latent_size": 6}
    return {
        "llama": write_llama(folder / "llama", **LLAMA),
        "one head": write_llama(folder / "one", **LLAMA | ONE_KV_HEAD),
        "other": write_llama(folder / "other", seed=9, **LLAMA),
        "eagle": write_eagle1(folder / "eagle", eagle1_tensors(**LLAMA), **one_layer),
        "eagle3": write_safeailab(folder / "eagle3", head_tensors(**LLAMA), **one_layer),
        "headless": write_safeailab(folder / "headless", headless, **one_layer),
        "map": folder / "map.json",
        "odd": write_llama(folder / "odd", seed=9, **LLAMA | ODD),
        "odd head": write_safeailab(
            folder / "odd-head", head_tensors(**LLAMA | ODD), **one_layer | ODD
        ),
        "latent": write_nextn(folder / "latent", seed=3),
        "mimo": write_module(folder / "mimo", "mimo"),
        "dense": write_checkpoint(folder / "dense", dense, hybrid_tensors(dense, seed=4)),
        "experts": write_checkpoint(
            folder / "experts", experts, merged_experts(hybrid_tensors(experts, seed=3))
        ),
        "twin": write_checkpoint(folder / "twin", twin, twin_tensors(twin, seed=6)),
        "nemotron": write_nemotron(folder / "nemotron", seed=4, **nemotron),
        "granite": write_family(folder / "granite", "granite_hybrid", **one_group),
        "falcon": write_family(folder / "falcon", "falcon_h1", **one_group | ONE_KV_HEAD),
        "circle": write_circle(folder / "circle", **SIZES),
        MEDUSA: write_circle_head(folder / MEDUSA, MEDUSA, VOCAB),
        MLP: write_circle_head(folder / MLP, MLP, VOCAB),
    }


def speculation(files, method, kind="llama"):
    if method in ("self", "other", "odd"):
        path = files[kind if method == "self" else method]
        return {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    if method == "mapped":
        return speculation(files, "eagle") | {"token_map": str(files["map"])}
    if method == "cascade":
        return speculation(files, "headless") | {"cascade": "ngram"}
    if method in ("eagle", "eagle3", "headless", "odd head"):
        name = "eagle" if method == "eagle" else "eagle3"
        return {"method": name, "model": str(files[method]), "num_speculative_tokens": 2}
    if method in (MEDUSA, MLP):
        return {"method": method, "model": str(files[method])}
    return DRAFTS[method]


@pytest.fixture(scope="module")
def truths(files):
    """Of a kind: every request alone in its batch, plainly."""
    return cache(lambda kind: answer(files[kind], max_num_seqs=1))


@pytest.mark.parametrize(
    ("kind", "method", "steps_in_flight", "max_num_seqs", "chunk"),
    [
        ("llama", "plain", 3, 3, 16),
        ("llama", "ngram", 2, 6, 32),
        ("llama", "self", 3, 6, 16),
        ("llama", "other", 2, 4, 32),
        ("llama", "eagle3", 1, 6, 16),
        ("llama", "eagle", 2, 3, 64),
        ("one head", "self", 2, 6, 16),
        ("dense", "plain", 3, 3, 16),
        ("experts", "long", 1, 2, 16),
        ("dense", "mtp", 2, 6, 64),
        ("experts", "self", 2, 4, 32),
        ("nemotron", "long", 2, 6, 32),
        ("nemotron", "mtp", 3, 3, 16),
        ("granite", "ngram", 2, 3, 16),
        ("falcon", "long", 3, 6, 32),
    ],
)
def test_the_same_tokens(files, truths, kind, method, steps_in_flight, max_num_seqs, chunk):
    answers = answer(
        files[kind],
        speculation(files, method, kind),
        steps_in_flight=steps_in_flight,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=chunk,
    )
    assert answers == truths(kind)
    assert (answers.offered > 0) == (method != "plain")


def test_the_same_tokens_of_four_ranks_that_share_two_kv_heads(files):
    four = partial(answer, files["llama"], tensor_parallel_size=4)
    answers = four(speculation(files, "self"), steps_in_flight=2, prefill_chunk_size=16)
    assert answers == four(max_num_seqs=1)
    assert answers.offered > 0


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_the_same_tokens_of_a_gguf_file_in_its_bits(tmp_path, name):
    sizes = {"intermediate_size": 128, "max_position_embeddings": 256}
    path = write_gguf(tmp_path / "model.gguf", name, **sizes)
    packed = partial(answer, path, load_format="gguf-packed")
    answers = packed(NGRAM, steps_in_flight=3, max_num_seqs=3, prefill_chunk_size=16)
    assert answers == packed(max_num_seqs=1)
    assert answers.offered > 0


@pytest.mark.parametrize(
    ("kind", "method", "num_kv_blocks"), [("llama", "self", 10), ("experts", "mtp", 9)]
)
def test_scarce_memory_and_preemption_change_nothing(files, truths, kind, method, num_kv_blocks):
    drafts = speculation(files, method, kind)
    config = config_of(files[kind], drafts, num_kv_blocks=num_kv_blocks, max_num_seqs=6)
    with engine_over_threads(config) as (core, _):
        assert drive(core) == truths(kind)
        assert core._runner.num_swaps


@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_a_drafter_that_is_the_target_is_always_right(files, kind):
    """Ranks divide it as they divide the target."""
    plain = [item for item in requests() if item.params.top_p == 1]
    answers = answer(files[kind], speculation(files, "self", kind), plain)
    assert answers.accepted == answers.offered > 0


#: Of the Llama: drafters that two ranks divide, and those that each has whole.
DIVIDED = ("other", "eagle", "eagle3", "headless", "mapped", "cascade")
WHOLE = ("odd", "odd head")


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("llama", method) for method in (*DIVIDED, *WHOLE)),
        *((kind, "mtp") for kind in ("dense", "experts", "latent", "mimo")),
        *(("circle", method) for method in (MEDUSA, MLP)),
    ],
)
def test_a_drafter_is_right_as_often_as_with_one_rank(files, kind, method):
    """It is divided, or whole on each rank, and shares what the target has divided.

    Adaptive limits follow what a rank reads.
    """
    drafts = speculation(files, method) | {"draft_limits": "fixed"}
    options = {"steps_in_flight": 2, "prefill_chunk_size": 16}
    two = answer(files[kind], drafts, **options)
    one = answer(files[kind], drafts, tensor_parallel_size=1, **options)
    assert [tokens for tokens, _ in two.values()] == [tokens for tokens, _ in one.values()]
    assert (two.offered, two.accepted) == (one.offered, one.accepted)
    assert two.accepted > 0


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("llama", method) for method in ("other", "eagle", "eagle3", *WHOLE)),
        *((kind, "mtp") for kind in ("dense", "mimo")),
    ],
)
def test_each_rank_has_a_part_of_a_drafter_and_of_its_kv(files, kind, method):
    drafts, divided = speculation(files, method), method not in WHOLE
    alone = build_engine(config_of(files[kind], drafts, tensor_parallel_size=1)).weights.drafter
    with engine_over_threads(config_of(files[kind], drafts)) as (core, _):
        own = core.weights.own.drafter
        assert (own.weights_bytes < 0.8 * alone.weights_bytes) == divided
        part, whole = (bytes_per_block(one.caches, 1) for one in (own, alone))
        assert part * (1 + divided) == whole
        drive(core)


def test_a_module_that_is_its_target_s_twin_is_always_right(files):
    """Token 0 begins every prompt; every other request is sampled."""
    prompts = [(0, *range(i, i + length)) for i, length in enumerate((1, 15, 16, 31, 33))]
    items = requests_of(prompts, MAX_TOKENS, 0.0, 0.9)
    plain = answer(files["twin"], None, items, max_num_seqs=1)
    answers = answer(files["twin"], DRAFTS["mtp"], items, steps_in_flight=3)
    assert answers == plain
    assert answers.accepted == answers.offered > 0


@pytest.mark.parametrize("method", ["long", "mtp"])
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


def test_every_rank_runs_its_heads_of_a_hybrid_in_chunks(files):
    """Prompts that end on both sides of one, alone or beside others that draft."""
    prompts = [([*range(40)] * 4)[:150], ([*range(9)] * 8)[:65], [*range(9)]]
    items = requests_of(prompts, MAX_TOKENS, 0.0, 0.9, logprobs=1)
    options = {"fast_prompts_from": 65, "max_num_batched_tokens": 341, "max_model_len": 200}
    plain = answer(files["dense"], None, items, max_num_seqs=1, prefill_chunk_size=0, **options)
    more = {"steps_in_flight": 2, "prefill_chunk_size": 100}
    assert answer(files["dense"], DRAFTS["mtp"], items, **more, **options) == plain
    usual = answer(files["dense"], None, items, **options | {"fast_prompts_from": 0})
    assert [usual[name] == plain[name] for name in plain] == [False, False, True]


def test_processes_say_the_same(files, truths):
    core = build_engine(config_of(files["experts"], DRAFTS["mtp"], steps_in_flight=2))
    answers = drive(core)
    assert answers == truths("experts")
    assert answers.accepted > 0


def test_ranks_that_share_a_kv_head_have_it_whole(files):
    whole = build_engine(config_of(files["one head"], tensor_parallel_size=1)).resolved
    with engine_over_threads(config_of(files["one head"])) as (core, _):
        assert core.resolved.request_memory.kv_per_token == whole.request_memory.kv_per_token
        kv = core._runner._inner.step.kv.blocks
        assert sum(memory.nbytes for memory in kv) == core.resolved.kv_bytes


def test_each_rank_has_its_heads_state_and_no_more(files):
    one = build_engine(config_of(files["dense"], DRAFTS["long"], tensor_parallel_size=1)).resolved
    with engine_over_threads(config_of(files["dense"], DRAFTS["long"])) as (core, _):
        assert 2 * core.resolved.recurrent_bytes == one.recurrent_bytes > 0
        slots = core._runner._inner.step.kv.slots
        assert sum(memory.nbytes for memory in slots) == core.resolved.recurrent_bytes
        assert core.resolved.num_kv_blocks >= one.num_kv_blocks
        kv, whole = core.resolved.request_memory, one.request_memory
        assert 2 * kv.kv_per_token == whole.kv_per_token
        assert 2 * kv.recurrent_state == whole.recurrent_state
        assert 2 * kv.pending == whole.pending > 0


@pytest.mark.parametrize("kind", ["llama", "one head"])
def test_logits_are_near_those_of_one_rank_and_not_the_same(files, kind):
    """The degree is part of the arithmetic: the law holds for each by itself."""
    rows = {}
    for size in (1, 2):
        config = config_of(files[kind], tensor_parallel_size=size)
        found = rows[size] = {}
        record = partial(_recorded, found)
        if size == 1:
            record(build_engine(config))
        else:
            with engine_over_threads(config) as (core, _):
                record(core)
    assert rows[1].keys() == rows[2].keys()
    differ = 0
    for where, row in rows[1].items():
        torch.testing.assert_close(rows[2][where], row, rtol=1e-4, atol=1e-4)
        differ += not torch.equal(rows[2][where], row)
    assert differ


def _recorded(found, core):
    """Raw logits of the first emitted token of every prompt."""
    leading = core._runner
    recorded = RecordedLogits()
    if hasattr(leading, "_inner"):
        leading._inner = recorded.runner(leading._inner)
    else:
        core._runner = recorded.runner(leading)
    drive(core)
    found |= {where: row for where, row in recorded.rows.items() if where[1] == len(where[0])}
