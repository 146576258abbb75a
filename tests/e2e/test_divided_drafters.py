"""Two ranks divide the model of a drafter, where its sizes allow; else each has all of it."""

from __future__ import annotations

import json

import pytest

from helpers.checkpoints import (
    eagle1_tensors,
    head_tensors,
    write_checkpoint,
    write_eagle1,
    write_llama,
    write_safeailab,
)
from helpers.dense_modules import write_module
from helpers.hybrids import hybrid_config, hybrid_tensors
from helpers.latents import write_nextn
from helpers.thread_ranks import engine_over_threads
from helpers.two_ranks import VOCAB, answer, config_of, drive, requests
from helpers.updates import tensors_of
from sametoken import LLM
from sametoken.engine.build import build_engine

SIZES = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
}
ONE_LAYER = SIZES | {"num_hidden_layers": 1}
#: Two ranks do not divide it.
ODD = {"intermediate_size": 33}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    headless = head_tensors(full_vocab=True, **SIZES)
    del headless["lm_head.weight"]
    hybrid = hybrid_config("qwen3_5", **SIZES | {"linear_num_key_heads": 2})
    (folder / "map.json").write_text(json.dumps(list(range(0, VOCAB, 2))))
    return {
        "target": write_llama(folder / "target", **SIZES),
        "latent": write_nextn(folder / "latent", seed=3),
        "mimo": write_module(folder / "mimo", "mimo"),
        "hybrid": write_checkpoint(folder / "hybrid", hybrid, hybrid_tensors(hybrid, seed=4)),
        "other": write_llama(folder / "other", seed=9, **SIZES),
        "odd": write_llama(folder / "odd", seed=9, **SIZES | ODD),
        "eagle": write_eagle1(folder / "eagle", eagle1_tensors(**SIZES), **ONE_LAYER),
        "eagle3": write_safeailab(folder / "eagle3", head_tensors(**SIZES), **ONE_LAYER),
        "headless": write_safeailab(folder / "headless", headless, **ONE_LAYER),
        "odd head": write_safeailab(
            folder / "odd-head", head_tensors(**SIZES | ODD), **ONE_LAYER | ODD
        ),
        "map": folder / "map.json",
    }


#: Method, drafter and further options.
DRAFTERS = {
    "model": ("draft_model", "other", {}),
    "eagle": ("eagle", "eagle", {}),
    "eagle3": ("eagle3", "eagle3", {}),
    "headless": ("eagle3", "headless", {}),
    "mapped": ("eagle", "eagle", {"token_map": "map"}),
    "cascade": ("eagle3", "headless", {"cascade": "ngram"}),
    **{name: ("mtp", None, {}) for name in ("hybrid", "latent", "mimo")},
}
WHOLE = {"odd": ("draft_model", "odd", {}), "odd head": ("eagle3", "odd head", {})}


def speculation(files, name) -> dict:
    method, model, options = (DRAFTERS | WHOLE)[name]
    spec = {"method": method, "num_speculative_tokens": 2, "draft_limits": "fixed"} | options
    if "token_map" in options:
        spec["token_map"] = str(files["map"])
    return spec if model is None else spec | {"model": str(files[model])}


def target_of(files, name):
    return files["target" if (DRAFTERS | WHOLE)[name][1] else name]


@pytest.mark.parametrize("name", [*DRAFTERS, *WHOLE])
def test_drafts_and_tokens_are_those_of_one_rank(files, name):
    """Up to rounding, which tells nothing apart here."""
    drafts = speculation(files, name)
    options = {"steps_in_flight": 2, "prefill_chunk_size": 16}
    two = answer(target_of(files, name), drafts, **options)
    one = answer(target_of(files, name), drafts, tensor_parallel_size=1, **options)
    assert [tokens for tokens, _ in two.values()] == [tokens for tokens, _ in one.values()]
    assert (two.offered, two.accepted) == (one.offered, one.accepted)
    assert two.accepted > 0


@pytest.mark.parametrize("name", ["model", "eagle", "eagle3", "hybrid", "mimo", *WHOLE])
def test_each_rank_has_a_part_of_its_weights_and_memory(files, name):
    drafts = speculation(files, name)
    alone = build_engine(config_of(target_of(files, name), drafts, tensor_parallel_size=1))
    with engine_over_threads(config_of(target_of(files, name), drafts)) as (core, _):
        whole, part = (one.weights for one in (alone, core))
        own = part.own.drafter
        divided = name not in WHOLE
        assert (own.weights_bytes < 0.8 * whole.drafter.weights_bytes) == divided
        per_token = [
            sum(shape.nbytes for cache in one.caches for shape in cache.block_shapes(1))
            for one in (own, whole.drafter)
        ]
        assert per_token[0] * (1 + divided) == per_token[1]
        drive(core)


def test_every_rank_takes_its_part_of_new_drafter_weights(files):
    """A draft model that becomes the target is always right from then on, also after hits."""
    items = [one for one in requests() if one.params.top_p == 1]
    core = build_engine(config_of(files["target"], speculation(files, "model")))
    live = LLM.from_engine(core, None)
    try:
        before = drive(core, items)
        live.update_weights(tensors_of(files["target"]).items(), target="drafter")
        after = drive(core, items)
    finally:
        core.peers.stop()
    assert before.accepted < before.offered
    assert after == before
    assert after.accepted == after.offered > 0
