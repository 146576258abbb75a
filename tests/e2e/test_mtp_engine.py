"""Engines that draft with the multi-token-prediction module of their own checkpoint."""

from __future__ import annotations

import json
from functools import partial
from itertools import cycle

import pytest

from helpers import dense_modules, latents
from helpers.checkpoints import VOCAB, write_checkpoint, write_llama
from helpers.dense_modules import ERNIE, MIMO, write_module
from helpers.harness import run, swapped_by
from helpers.hybrids import (
    hybrid_config,
    hybrid_tensors,
    merged_experts,
    without_mtp,
    write_hybrid,
)
from helpers.small_engines import build, cached_by, mtp, plain, requests
from helpers.twin import write_qwen
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.models.decoder import Decoder


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next", ERNIE, MIMO])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    if request.param in (ERNIE, MIMO):
        return write_module(path, request.param, seed=3, tie_word_embeddings=request.param == ERNIE)
    config = hybrid_config(request.param)
    return write_checkpoint(path, config, merged_experts(hybrid_tensors(config, seed=3)))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_hybrid(tmp_path_factory.mktemp("dense"), seed=4)


TWINS = {
    "recurrent": partial(write_qwen, seed=6),
    "latent": latents.write_twin,
    "ernie": partial(dense_modules.write_twin, kind=ERNIE),
    "mimo": partial(dense_modules.write_twin, kind=MIMO),
}


@pytest.fixture(scope="module", params=TWINS)
def twin(request, tmp_path_factory):
    return TWINS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("k", "steps"), zip((1, 3, 8), cycle(("static", "compact"))))
def test_no_number_of_drafts_changes_a_token(dense, k, steps):
    drafted = run(build(dense, mtp(k), steps), requests())
    assert drafted.tokens == plain(dense)
    assert drafted.offered > 0


@pytest.mark.parametrize(("dtype", "steps"), [("float32", "compact"), ("bfloat16", "static")])
def test_neither_do_experts_nor_another_dtype(checkpoint, dtype, steps):
    drafted = run(build(checkpoint, mtp(3), steps, dtype=dtype), requests())
    assert drafted.tokens == plain(checkpoint, dtype)
    assert drafted.offered > 0


@pytest.mark.parametrize(
    ("steps_in_flight", "chunk", "steps"), [(1, 8, "static"), (2, 16, "compact"), (3, 8, "static")]
)
def test_chunk_edges_and_steps_in_flight_change_no_token(dense, steps_in_flight, chunk, steps):
    core = build(dense, mtp(4), steps, steps_in_flight=steps_in_flight, prefill_chunk_size=chunk)
    assert run(core, requests()).tokens == plain(dense)


@pytest.mark.parametrize(
    ("k", "steps"), [*zip((1, 3, 8), cycle(("compact", "static"))), (2, "kernels")]
)
def test_a_module_that_is_its_target_s_twin_is_always_accepted(twin, k, steps):
    """Through chunks and steps in flight, by greedy requests and sampled ones."""
    drafted = run(build(twin, mtp(k), steps, steps_in_flight=1 + k % 3), requests())
    assert drafted.tokens == plain(twin)
    assert drafted.accepted == drafted.offered > 0


def test_preemption_takes_its_memory_along(twin, monkeypatch):
    core = build(twin, mtp(3), num_kv_blocks=8, max_model_len=40)
    swapped = swapped_by(core, monkeypatch)
    drafted = run(core, requests())
    assert swapped, "nothing was preempted"
    assert drafted.tokens == plain(twin)
    assert drafted.accepted == drafted.offered > 0


def test_synthetic_acceptance_accepts_as_often_as_it_is_told(dense):
    synthetic = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0, 0.0],
        "draft_limits": "fixed",
    }
    drafted = run(build(dense, mtp(3, **synthetic)), requests())
    assert drafted.offered > 0
    assert 0.5 < drafted.accepted / drafted.offered < 0.8


@pytest.mark.parametrize("twin", ["latent"], indirect=True)
def test_a_cached_prefix_changes_no_token(twin):
    core = build(twin, mtp(3), enable_prefix_caching=True)
    assert run(core, requests()).tokens == plain(twin)
    cached = cached_by(core)
    warm = run(core, requests())
    assert warm.tokens == plain(twin)
    assert warm.accepted == warm.offered > 0
    assert max(cached) >= 16


def published_shape(config: dict) -> dict:
    """The keys of Qwen3.5-9B's config.json over small sizes."""
    published = {
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "attention_bias": False,
        "mamba_ssm_dtype": "float32",
        "eos_token_id": 5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
        },
    }
    text = {key: value for key, value in config["text_config"].items() if key != "layer_types"}
    del text["mtp_use_dedicated_embeddings"]
    return config | {
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "text_config": text | published | {"dtype": "bfloat16"},
        "vision_config": {"depth": 2, "hidden_size": 8},
        "tie_word_embeddings": False,
    }


def test_a_published_config_alone_makes_a_drafting_engine(tmp_path):
    config = published_shape(hybrid_config("qwen3_5"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    core = build(tmp_path, mtp(3), load_format="dummy")
    assert core.resolved.model.vocab_size == VOCAB
    drafted = run(core, requests()[:2])
    assert drafted.offered > 0
    assert drafted.tokens == run(build(tmp_path, load_format="dummy"), requests()[:2]).tokens


def refuse_to_load(monkeypatch) -> None:
    def loaded(self, *args, **options):
        raise AssertionError("the target was loaded first")

    monkeypatch.setattr(Decoder, "__init__", loaded)


def test_a_checkpoint_without_the_module_is_refused_before_the_target_loads(tmp_path, monkeypatch):
    config = hybrid_config("qwen3_5")
    write_checkpoint(tmp_path, config, without_mtp(hybrid_tensors(config)))
    refuse_to_load(monkeypatch)
    with pytest.raises(CheckpointError, match="holds no multi-token-prediction module"):
        build(tmp_path, mtp(2))


def test_a_target_of_another_kind_is_refused_before_it_loads(tmp_path, monkeypatch):
    write_llama(tmp_path)
    refuse_to_load(monkeypatch)
    with pytest.raises(UnsupportedError, match="'mtp' does not run with LlamaForCausalLM"):
        build(tmp_path, mtp(2))


def test_more_drafts_than_a_module_is_good_for_are_refused(dense):
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=9 .* 'mtp'"):
        build(dense, mtp(9))


@pytest.mark.parametrize("twin", ["recurrent"], indirect=True)
def test_a_token_map_changes_no_token(twin, tmp_path):
    names = {"all": list(range(VOCAB)), "half": list(range(0, VOCAB, 2))}
    ran = {"none": run(build(twin, mtp(3)), requests())}
    for name, ids in names.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(ids))
        spec = mtp(3, token_map=str(tmp_path / f"{name}.json"))
        ran[name] = run(build(twin, spec), requests())
    assert ran["none"].tokens == ran["all"].tokens == ran["half"].tokens == plain(twin)
    assert ran["none"].accepted == ran["all"].accepted == ran["all"].offered
    assert 0 < ran["half"].accepted < ran["half"].offered


def test_a_token_map_for_another_vocabulary_is_refused(dense, tmp_path):
    (tmp_path / "map.json").write_text(json.dumps([1, VOCAB]))
    with pytest.raises(ConfigError, match=f"outside a vocabulary of {VOCAB}"):
        build(dense, mtp(3, token_map=str(tmp_path / "map.json")))
