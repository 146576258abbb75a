"""Every family computes what transformers computes; drafts, chunks and ranks change no token."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MinistralForCausalLM

from helpers.dense_modules import MIMO, write_module
from helpers.families import (
    FAMILIES,
    OPEN_YARN,
    SEEING,
    VOCAB,
    YARN,
    drawn_config,
    fixed_config,
    random_model,
    write_family,
)
from helpers.forward import CPU, Bench, load, require_logits_by_kernels
from helpers.harness import requests_of, run
from helpers.latents import LATENTS, drawn_latent, fixed_latent, write_latent
from helpers.parity import (
    BACKENDS,
    drawn_models,
    require_logits,
    require_logits_of_edited,
    require_parity,
    require_parity_of_ranks,
    saved_and_loaded,
)
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.errors import UnsupportedError
from sametoken.models.load.sent import SentTensors
from sametoken.models.load.weights import WeightReader
from sametoken.models.mistral import MistralForCausalLM
from sametoken.models.qwen2 import MiMoForCausalLM

PROMPT = torch.randint(VOCAB, (41,), generator=torch.Generator().manual_seed(0)).tolist()


NAMES = (*FAMILIES, *LATENTS)


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
    """The name of a family, and a checkpoint."""
    write = write_latent if request.param in LATENTS else write_family
    return request.param, write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("name", NAMES)
@drawn_models(4)
@given(data=st.data())
def test_random_models_agree_with_transformers(name, data):
    config = (drawn_latent if name in LATENTS else drawn_config)(data.draw, name)
    theirs = random_model(config, data.draw(st.integers(0, 2**20)))
    ours = saved_and_loaded(theirs, data.draw(st.sampled_from(BACKENDS)))
    require_parity(ours, theirs, PROMPT, data.draw(st.lists(st.integers(1, 12), max_size=3)))


@drawn_models(4)
@given(data=st.data())
def test_mistral_with_layer_types_is_ministral(data):
    """As first published: transformers reads such a config as Ministral's."""
    written = random_model(drawn_config(data.draw, "ministral"), data.draw(st.integers(0, 2**20)))
    kernels = data.draw(st.sampled_from(BACKENDS))
    with tempfile.TemporaryDirectory() as directory:
        written.save_pretrained(directory)
        path = Path(directory, "config.json")
        named = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        path.write_text(json.dumps(json.loads(path.read_text()) | named))
        theirs = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False).eval()
        assert type(theirs) is MinistralForCausalLM
        ours = load(directory, kernels)
    assert type(ours) is MistralForCausalLM
    require_parity(ours, theirs, PROMPT, data.draw(st.lists(st.integers(1, 12), max_size=3)))


@pytest.mark.parametrize("kernels", BACKENDS)
def test_mimo_is_qwen2_beside_its_module(tmp_path, kernels):
    ours = load(write_module(tmp_path, MIMO, seed=2), kernels)
    assert type(ours) is MiMoForCausalLM
    theirs = random_model(fixed_config("qwen2", head_dim=8), seed=2)
    require_parity(ours, theirs, PROMPT, [7])


_TYPES = ["full_attention", "sliding_attention", "full_attention"]
_WINDOWS = {"sliding_window": 5, "use_sliding_window": False, "max_window_layers": 1}
_YARN_OF_128 = {"rope_type": "yarn", "factor": 4.0}
_ORIGINAL_16 = {"original_max_position_embeddings": 16}
_BIASES = {"attention_bias": True}
#: Keys that other classes read, by the family whose class passes over them.
PASSED_OVER = [
    ("ministral", _BIASES | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.7}}),
    ("ministral", _WINDOWS | {"layer_types": None}),
    ("ministral3", _BIASES | _WINDOWS | {"layer_types": _TYPES}),
    ("phi3", _WINDOWS | {"layer_types": _TYPES}),
    ("gemma3", {"rope_parameters": None, "rope_scaling": _YARN_OF_128} | _ORIGINAL_16),
    ("gemma4", {"num_experts_per_tok": 1}),
    *((name, {"use_sliding_window": False}) for name in ("gemma3", "gemma4", "gpt_oss", "olmo3")),
    ("deepseek_v2", {"rope_interleave": False}),
    ("mixtral", _BIASES | _WINDOWS | {"layer_types": _TYPES, "norm_topk_prob": False}),
    ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": -1}),
    ("ernie4_5_moe", {"n_group": 2, "topk_group": 1}),
    ("minimax_m2", {"n_group": 1, "topk_group": 2}),
]
PASSED_OVER_BESIDE_IMAGES = [
    ("mistral", {"rope_scaling": YARN | {"llama_4_scaling_beta": 0.7}}),
    ("mistral", _BIASES | _WINDOWS | {"layer_types": _TYPES}),
    ("ministral3", _WINDOWS | {"layer_types": _TYPES}),
    ("qwen3", _WINDOWS | {"layer_types": _TYPES, "use_sliding_window": True}),
    ("gemma3", {"final_logit_softcapping": 2.0}),
]


@pytest.mark.parametrize(("name", "changes"), PASSED_OVER)
def test_keys_that_transformers_passes_over(tmp_path, name, changes):
    config = (fixed_latent if name in LATENTS else fixed_config)(name)
    require_logits_of_edited(tmp_path, random_model(config, seed=2), changes, PROMPT, [7])


@pytest.mark.parametrize(("name", "changes"), PASSED_OVER_BESIDE_IMAGES)
def test_keys_that_transformers_passes_over_beside_images(tmp_path, name, changes):
    theirs = random_model(SEEING[name](), seed=2)
    require_logits_of_edited(tmp_path, theirs, changes, PROMPT, [7])


@pytest.mark.parametrize("of_text", [{}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("name", ["mistral", "ministral3"])
def test_mistral_3_without_a_head_is_tied(tmp_path, name, of_text):
    """Unless its config says otherwise; the first of the two has a head."""
    saved = random_model(SEEING[name](), seed=2)
    saved.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for level in (config, config["text_config"]):
        level.pop("tie_word_embeddings", None)
    config["text_config"] |= of_text
    path.write_text(json.dumps(config))
    theirs = type(saved).from_pretrained(tmp_path, trust_remote_code=False).eval()
    require_logits(load(tmp_path), theirs, PROMPT, [7])


#: Values that no published config has, by family.
AT_THE_EDGES = [
    ("gpt_oss", {"rope_parameters": {}}),
    ("gpt_oss", {"rope_parameters": OPEN_YARN | {"truncate": None}}),
]


@pytest.mark.parametrize(("name", "changes"), AT_THE_EDGES)
def test_configs_at_their_edges(tmp_path, name, changes):
    require_logits_of_edited(
        tmp_path, random_model(fixed_config(name), seed=2), changes, PROMPT, [7]
    )


@pytest.mark.parametrize("key", ["norm_topk_prob", "rope_interleave"])
def test_a_null_is_off_where_transformers_has_it_off(tmp_path, key):
    theirs = random_model(fixed_latent("deepseek_v3"), seed=2)
    require_logits_of_edited(tmp_path, theirs, {key: None}, PROMPT, [7])


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_no_rope_is_scaled_by_a_type_that_transformers_passes_over(tmp_path, name):
    path = write_family(tmp_path, name) / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_scaling": {"type": "linear", "factor": 8.0}}))
    with pytest.raises(UnsupportedError, match=r"rope_scaling=.* is not supported") as caught:
        load(tmp_path)
    assert "rope_type" in caught.value.remedy
    both = {"type": "linear", "rope_type": "linear", "factor": 8.0}
    path.write_text(json.dumps(config | {"rope_scaling": both}))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", trust_remote_code=False
    ).eval()
    require_logits(load(tmp_path), theirs, PROMPT, [7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_chunk(family, dtype):
    """Of more rows than three of the reference's products, several windows and blocks have."""
    prompt = PROMPT[:25]
    for kernels in BACKENDS:
        ours = load(family[1], kernels, dtype=dtype)
        whole = Bench(ours).logits(prompt, [])
        chunks = [1, 1, 3, 11, *[1] * 9]
        assert torch.equal(Bench(ours).logits(prompt, chunks), whole)


def test_queries_of_ministral_3_need_not_grow():
    theirs = random_model(
        fixed_config("ministral3", rope_parameters=YARN | {"llama_4_scaling_beta": 0}), seed=0
    )
    require_logits(saved_and_loaded(theirs, BACKENDS[0]), theirs, PROMPT, [7])


def test_granite_4_without_mamba_2_or_experts():
    dense = {"layer_types": ["full_attention"] * 3, "num_local_experts": 0}
    config = fixed_config("granite_hybrid", position_embedding_type="rope", **dense)
    theirs = random_model(config, seed=0)
    require_parity(saved_and_loaded(theirs, BACKENDS[1]), theirs, PROMPT, [7])


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def emitted(path, spec, temperature, max_model_len=96, num_kv_blocks=80):
    """What an engine gives to three requests of 53 tokens or less."""
    options = {"device": "cpu", "max_num_seqs": 4, "block_size": 4, "num_kv_blocks": num_kv_blocks}
    core = build_engine(
        EngineConfig.from_options(
            model=str(path),
            dtype="bfloat16",
            max_model_len=max_model_len,
            speculative_config=spec,
            **options,
        )
    )
    prompts = [PROMPT[:9] * 2, PROMPT[3:9] * 3, PROMPT[:29]]
    return run(core, requests_of(prompts, 24, temperature))


def test_drafts_change_no_token(family):
    temperature = float(NAMES.index(family[0]) % 2)
    plain, drafted = (emitted(family[1], spec, temperature) for spec in (None, NGRAM))
    assert drafted.tokens == plain.tokens
    assert drafted.offered > drafted.accepted, "some drafts were wrong"


def write_longrope(directory):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "original_max_position_embeddings": 60,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    }
    return write_family(
        directory, "phi3", rope_parameters=rope, original_max_position_embeddings=60
    )


def test_the_longest_request_alone_chooses_longrope_s_factors(tmp_path):
    """Tables are longer than requests, for drafts: where they end must not decide."""
    path = write_longrope(tmp_path)
    short, long = ([emitted(path, spec, 1.0, n).tokens for spec in (None, NGRAM)] for n in (60, 61))
    assert short[0] == short[1]
    assert long[0] == long[1]
    assert short != long


def test_kv_memory_does_not_choose_longrope_s_factors(tmp_path):
    """A batch may be resumed with another one."""
    path = write_longrope(tmp_path)
    little, much = (emitted(path, None, 1.0, None, n).tokens for n in (15, 80))
    assert little == much == emitted(path, None, 1.0, 128).tokens


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize(
    "name", ["falcon_h1", "gemma3", "glm4_moe", "gpt_oss", "olmo2", "hunyuan_dense"]
)
def test_kernels_of_a_gpu_give_the_reference_s_logits(tmp_path, name):
    path = write_family(tmp_path, name, num_hidden_layers=2)
    require_logits_by_kernels(path, PROMPT[:6], [3, 1])


def test_two_ranks_agree_and_are_near_one(family):
    require_parity_of_ranks(family[1], PROMPT)


FALCONS_NORM = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}


@pytest.mark.parametrize(
    ("name", "shared", "size", "others"),
    [
        ("granite_hybrid", 1, 2, {}),
        ("falcon_h1", 1, 2, FALCONS_NORM),
        ("falcon_h1", 2, 4, FALCONS_NORM),
        ("bamba", 2, 4, {}),
        ("ernie4_5", 1, 2, {}),
        ("gemma4", 1, 2, {"num_global_key_value_heads": 1}),
        ("gemma4", 2, 4, {"num_key_value_heads": 4}),
        ("gpt_oss", 1, 2, {}),
        ("hunyuan_dense", 1, 2, {}),
        ("olmo2", 2, 4, {"attention_bias": True}),
        ("phi3", 1, 2, {}),
        ("qwen2", 2, 4, {}),
    ],
)
def test_ranks_that_share_heads_and_groups_are_near_one(tmp_path, name, shared, size, others):
    """KV heads, and groups of Mamba-2: fewer than ranks."""
    groups = {"mamba_n_groups": shared} if "mamba_n_groups" in FAMILIES[name][2] else {}
    changes = {"num_key_value_heads": shared} | groups | others
    require_parity_of_ranks(write_family(tmp_path, name, **changes), PROMPT, size)


@pytest.mark.parametrize("name", ["mixtral", "minimax_m2", "ernie4_5_moe"])
def test_a_trainer_sends_experts_by_the_names_that_transformers_gives_them(tmp_path, name):
    theirs = random_model(fixed_config(name), seed=1)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    sent = SentTensors(theirs.state_dict().items())
    updated = ours.reloaded(WeightReader(sent, ours.kernels, torch.float32, CPU))
    assert torch.equal(Bench(updated).logits(PROMPT, []), Bench(ours).logits(PROMPT, []))


@pytest.mark.parametrize("name", SEEING)
def test_the_text_decoder_of_a_model_that_also_sees(tmp_path, name):
    theirs = random_model(SEEING[name](), seed=1)
    theirs.save_pretrained(tmp_path)
    require_logits(load(tmp_path, BACKENDS[1]), theirs, PROMPT, [7])
    said = []
    options = {"device": "cpu", "max_model_len": 64, "num_kv_blocks": 40, "max_num_seqs": 2}
    build_engine(EngineConfig.from_options(model=str(tmp_path), **options), said.append)
    assert sum("only the text decoder is loaded" in line for line in said) == 1
