"""config.json in the forms that checkpoints have it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from transformers import (
    BambaConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    FalconH1Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLTextConfig,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

from helpers.forward import load
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.layer_types import sliding_windows
from sametoken.models.load import huggingface
from sametoken.models.load.gguf_file import read_gguf
from sametoken.models.load.huggingface import open_weights
from sametoken.models.loader import read_config
from sametoken.models.registry import ARCHITECTURES
from sametoken.text.tokenizer import load_tokenizer

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
BASE = SIZES | {"architectures": ["LlamaForCausalLM"]}


def architecture_of(config_class: type) -> str:
    return re.sub("(Text)?Config$", "ForCausalLM", config_class.__name__)


def read(directory, config, generation_config=None):
    (directory / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return read_config(directory)


def test_absent_keys_take_the_values_transformers_implies(tmp_path):
    config = read(tmp_path, BASE)
    theirs = LlamaConfig(**SIZES)
    assert config.num_kv_heads == theirs.num_key_value_heads == 4
    assert config.head_dim == theirs.head_dim == 16
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope == theirs.rope_parameters
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.dtype == torch.float32


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12},
        {"architectures": ["ZambaForCausalLM"], "hybrid_layer_ids": "M-M*", "head_dim": 0},
        {"architectures": ["Gemma3nForCausalLM"], "rope_parameters": {"full_attention": {}}},
        {"architectures": ["OPTForCausalLM"], "quantization_config": {"bits": 4}},
    ],
    ids=lambda config: config["architectures"][0],
)
def test_other_architectures_are_refused_by_name_before_any_key_is_read(tmp_path, config):
    with pytest.raises(UnsupportedError) as caught:
        read(tmp_path, config)
    assert caught.value.cause == f"architecture {config['architectures'][0]!r} is not supported"
    assert caught.value.remedy == f"supported: {', '.join(ARCHITECTURES)}"


@pytest.mark.parametrize("name", ["Eagle3Speculator", "LlamaForCausalLMEagle3", "EagleLlamaModel"])
def test_a_head_in_place_of_its_target_is_told_where_it_belongs(tmp_path, name):
    with pytest.raises(UnsupportedError, match="not supported") as caught:
        read(tmp_path, {"architectures": [name]})
    assert '"model" of speculative_config' in caught.value.remedy


WITH_IMPLIED = [MistralConfig, MinistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig]


@pytest.mark.parametrize("config_class", WITH_IMPLIED)
def test_values_implied_by_one_architecture(tmp_path, config_class):
    name = architecture_of(config_class)
    sizes = SIZES | {"num_attention_heads": 32, "hidden_size": 128}
    config, theirs = read(tmp_path, sizes | {"architectures": [name]}), config_class(**sizes)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 128 // 32)
    for key in ARCHITECTURES[name].implied.keys() - {"sliding_window"}:
        assert config.extra[key] == getattr(theirs, key)
    # Qwen's imply a window too, but also that it is not used.
    assert sliding_windows(config, "") == [theirs.sliding_window] * 2


@pytest.mark.parametrize(
    "config_class",
    [
        BambaConfig, FalconH1Config, Ernie4_5Config, Ernie4_5_MoeConfig, Gemma3TextConfig,
        Gemma4TextConfig, Gemma4UnifiedTextConfig, Glm4MoeConfig, GptOssConfig, GraniteConfig,
        GraniteMoeHybridConfig, HunYuanDenseV1Config, MiniMaxM2Config, Ministral3Config,
        MixtralConfig, Olmo2Config, Olmo3Config, Phi3Config, Qwen2MoeConfig, SeedOssConfig,
        SmolLM3Config,
    ],
)  # fmt: skip
def test_what_one_family_implies(tmp_path, config_class):
    name = architecture_of(config_class)
    sizes = BASE | {"architectures": [name], "num_attention_heads": 16}
    found, theirs = read(tmp_path, sizes), config_class()
    # Gemma 4's layers differ.
    theirs.allow_global_per_layer_attribute_access = True
    rope = theirs.rope_parameters
    implied = dict(ARCHITECTURES[name].implied)
    assert found.rms_norm_eps == theirs.rms_norm_eps
    if "partial_rotary_factor" in implied:
        assert implied.pop("partial_rotary_factor") == rope["partial_rotary_factor"]
    if "rope_theta" in implied:
        assert implied.pop("rope_theta") == rope.get("full_attention", rope)["rope_theta"]
        assert found.local_rope == rope.get("sliding_attention")
    if not getattr(theirs, "use_sliding_window", True):
        # transformers writes 0 over a window that is not used.
        implied.pop("sliding_window", None)
    names = {own: given for given, own in ARCHITECTURES[name].aliases.items()}
    for key, value in implied.items():
        assert value == getattr(theirs, names.get(key, key))


@pytest.mark.parametrize(
    ("config_class", "given"),
    [
        (DeepseekV2Config, "num_experts"),
        (DeepseekV3Config, "num_local_experts"),
        (Ernie4_5_MoeConfig, "num_experts"),
        (Ernie4_5_MoeConfig, "num_experts_per_tok"),
        (Glm4MoeConfig, "num_local_experts"),
        (GptOssConfig, "num_experts"),
        (MiniMaxM2Config, "num_experts"),
        (MixtralConfig, "num_experts"),
        (NemotronHConfig, "num_local_experts"),
        (Qwen3MoeConfig, "num_experts"),
    ],
)
def test_a_setting_has_every_name_that_transformers_knows(tmp_path, config_class, given):
    """Of two that differ transformers takes one, whatever their order."""
    name = architecture_of(config_class)
    sizes = BASE | {"architectures": [name], "num_attention_heads": 16, "layer_types": None}
    sizes |= {"hybrid_override_pattern": "E*"} if config_class is NemotronHConfig else {}
    field = config_class.attribute_map[given]
    assert getattr(config_class(**{given: 3}), field) == 3
    own = ARCHITECTURES[name].aliases.get(given, given)
    assert read(tmp_path, sizes | {given: 3}).extra[own] == 3
    assert read(tmp_path, sizes | {field: 3, given: 3}).extra[own] == 3
    for both in ({given: 3, field: 4}, {field: 4, given: 3}):
        with pytest.raises(CheckpointError, match="by another name"):
            read(tmp_path, sizes | both)


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (Olmo3Config, {}),
        (Qwen2MoeConfig, {}),
        (Qwen2MoeConfig, {"use_sliding_window": True, "max_window_layers": 3}),
        (SmolLM3Config, {"sliding_window": 9}),
        (SmolLM3Config, {"use_sliding_window": True, "sliding_window": 9}),
    ],
)
def test_layers_that_a_config_leaves_out_are_those_of_transformers(tmp_path, config_class, changes):
    name = architecture_of(config_class)
    sizes = BASE | {"architectures": [name], "num_hidden_layers": 6, "num_key_value_heads": 2}
    found = read(tmp_path, sizes | changes)
    theirs = config_class(**{"num_hidden_layers": 6} | changes)
    windows = {"sliding_attention": theirs.sliding_window, "full_attention": None}
    caches = ARCHITECTURES[name].caches_of(found, found.dtype, "")
    assert [cache.window for cache in caches] == [windows[kind] for kind in theirs.layer_types]
    assert found.extra.get("no_rope_layers") == getattr(theirs, "no_rope_layers", None)


_YARN_8 = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
_ALPHA = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "type": "dynamic",
}


@pytest.mark.parametrize(
    ("name", "given", "rope", "local_rope"),
    [
        (
            "Olmo3ForCausalLM",
            {"rope_scaling": _YARN_8, "rope_theta": 500_000},
            _YARN_8 | {"rope_theta": 5e5},
            {"rope_type": "default", "rope_theta": 5e5},
        ),
        (
            "Olmo3ForCausalLM",
            {"rope_theta": 1e4},
            {"rope_type": "default", "rope_theta": 1e4},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        (
            "HunYuanDenseV1ForCausalLM",
            {"rope_scaling": _ALPHA, "rope_theta": 1e4, "head_dim": 128},
            {"rope_type": "default", "rope_theta": 1e4 * 1000 ** (128 / 126)},
            None,
        ),
        (
            "MiniMaxM2ForCausalLM",
            {"rotary_dim": 64, "rope_theta": 5_000_000, "head_dim": 128},
            {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            None,
        ),
    ],
)
def test_ropes_as_they_are_published(tmp_path, name, given, rope, local_rope):
    sizes = {"architectures": [name], "num_key_value_heads": 2, "max_position_embeddings": 65_536}
    found = read(tmp_path, BASE | sizes | given)
    assert (found.rope, found.local_rope) == (rope, local_rope)
    assert found.max_position_embeddings == 65_536


def test_gpt_oss_as_it_is_published(tmp_path):
    """Its rope in the old form; without one, and without layer types, as the class has it."""
    scaling = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    }
    given = {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 4,
        "num_local_experts": 32,
        "rope_scaling": scaling,
        "rope_theta": 150000,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    found, bare = read(tmp_path, given), read(tmp_path, {"architectures": given["architectures"]})
    assert found.rope == bare.rope == scaling | {"rope_theta": 150_000.0}
    assert (found.hidden_size, found.head_dim, found.num_heads) == (2880, 64, 64)
    assert (found.extra["num_experts"], bare.extra["num_experts"]) == (32, 128)
    assert found.max_position_embeddings == 131_072
    assert found.attention_bias
    caches = ARCHITECTURES["GptOssForCausalLM"].caches_of(found, found.dtype, "")
    assert [cache.window for cache in caches] == [128, None, 128, None]


def test_gemma_3_as_it_is_published(tmp_path):
    """A text config of few keys within that of a model that also sees; ropes in the old form."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    name = "Gemma3ForConditionalGeneration"
    config = {"architectures": [name], "text_config": text, "vision_config": {}}
    found = read(tmp_path, config | {"torch_dtype": "bfloat16"})
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (8, 4, 256)
    assert (found.vocab_size, found.max_position_embeddings) == (262_208, 131_072)
    assert found.tie_word_embeddings
    assert found.rope == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert found.local_rope == {"rope_type": "default", "rope_theta": 1e4}
    windows = [cache.window for cache in ARCHITECTURES[name].caches_of(found, found.dtype, "")]
    assert windows == ([1024] * 5 + [None]) * 5 + [1024] * 4


#: Of E2B, as it is published; "head_dim" of layers that see all had a key of its own.
GEMMA_4 = {
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "model_type": "gemma4_text",
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
}


def gemma_4(tmp_path, **changes):
    name = "Gemma4ForConditionalGeneration"
    config = {"architectures": [name], "text_config": GEMMA_4 | changes, "audio_config": {}}
    found = read(tmp_path, config)
    return found, ARCHITECTURES[name].caches_of(found, torch.bfloat16, "")


def test_gemma_4_as_it_is_published(tmp_path):
    found, caches = gemma_4(tmp_path)
    assert found.rope == {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }
    assert found.local_rope == {"rope_type": "default", "rope_theta": 1e4}
    assert found.also_sees
    assert [cache.num_kv_heads for cache in caches] == [1] * 15 + [0] * 20
    assert [(cache.k_dim, cache.window) for cache in caches] == (
        [(256, 512)] * 4 + [(512, None)]
    ) * 7
    one = {"head_dim": 512, "num_key_value_heads": 2}
    saved = {"per_layer_config": {str(index): one for index in range(4, 35, 5)}}
    found, caches = gemma_4(tmp_path, **saved, num_kv_shared_layers=0, attention_k_eq_v=True)
    assert [(cache.num_kv_heads, cache.k_dim) for cache in caches[:5]] == [(1, 256)] * 4 + [
        (2, 512)
    ]


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        ({"num_kv_shared_layers": 34}, CheckpointError, "no layer has the KV that layer 4 shares"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "1 layer_types for 35 layers"),
        ({"per_layer_config": {"4": {"x": 1}}}, UnsupportedError, "sets x of layer 4"),
        ({"global_head_dim": 511}, CheckpointError, "8 heads of size 511"),
    ],
)
def test_layers_that_gemma_4_cannot_have(tmp_path, changes, error, what):
    with pytest.raises(error, match=what):
        gemma_4(tmp_path, **changes)


@pytest.mark.parametrize("rope_type", ["longrope", "su", "yarn"])
def test_phi_3_as_it_is_published(tmp_path, rope_type):
    """The original positions stand beside the rope settings, which have had three names."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = BASE | {"architectures": ["Phi3ForCausalLM"], "rope_theta": 1e4}
    rope = {"rope_scaling": factors | {"type": rope_type}, "original_max_position_embeddings": 128}
    found = read(tmp_path, config | rope).rope
    found.pop("type")
    known = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    assert found == factors | known | {"original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"hidden_activation": "relu"}, "hidden_act='relu'"),
        (
            "Gemma4ForCausalLM",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention",
        ),
        ("GraniteForCausalLM", {"mlp_bias": True}, "mlp_bias=true"),
        ("SmolLM3ForCausalLM", {"mlp_bias": True}, "mlp_bias=true"),
        ("SeedOssForCausalLM", {"mlp_bias": True}, "mlp_bias=true"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "use_cla=true"),
        ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"type": "dynamic"}}, "'dynamic'"),
        ("Ernie4_5ForCausalLM", {"use_bias": True}, "use_bias=true"),
        ("MiniMaxM2ForCausalLM", {"sliding_window": 9}, "sliding_window=9"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 8}, "shared_intermediate_size=8"),
        ("Olmo2ForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(tmp_path, name, changes, what):
    read(tmp_path, BASE | {"architectures": [name], "num_key_value_heads": 2} | changes)
    with pytest.raises(UnsupportedError, match=what):
        load(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Ernie4_5ForCausalLM", {"compression_ratio": 2.0}),
        ("Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.1}),
        ("Ernie4_5_MoeForCausalLM", {"moe_use_aux_free": False}),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [0, 1]}),
        ("MiniMaxM2ForCausalLM", {"qk_norm_type": "per_head"}),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}),
        ("Olmo3ForCausalLM", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}),
    ],
)
def test_values_that_mean_something_else_are_refused_by_name(tmp_path, name, changes):
    sizes = BASE | {"architectures": [name], "num_key_value_heads": 2}
    same = {"compression_ratio": 1.0, "attn_type_list": [1, 1], "moe_norm_min": None}
    read(tmp_path, sizes | same)
    (key,) = changes
    with pytest.raises(UnsupportedError, match=rf"{key}=.* is not supported"):
        read(tmp_path, sizes | changes)


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Olmo3ForCausalLM"])
def test_borders_of_yarn_that_are_not_rounded_are_refused_by_layer_type(tmp_path, name):
    """transformers looks for the key beside the layer types."""
    config = BASE | {"architectures": [name], "rope_scaling": _YARN_8 | {"truncate": True}}
    read(tmp_path, config)
    with pytest.raises(UnsupportedError, match="truncate=False is not supported"):
        read(tmp_path, config | {"rope_scaling": _YARN_8 | {"truncate": False}})


@pytest.mark.parametrize("rotates", [[1], [1, 2], "11", [1, [0]]])
def test_layers_that_smollm3_cannot_have(tmp_path, rotates):
    name = "SmolLM3ForCausalLM"
    with pytest.raises(CheckpointError, match="no_rope_layers has no 0 or 1 for each of 2 layers"):
        read(tmp_path, BASE | {"architectures": [name], "no_rope_layers": rotates})


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("Gemma3", "tie_word_embeddings"),
        ("GptOss", "attention_bias"),
        ("Qwen2", "tie_word_embeddings"),
    ]
    + [(name, "use_sliding_window") for name in ("Qwen2", "Qwen3", "Qwen3Moe")],
)
def test_a_switch_that_is_null_is_as_good_as_absent(tmp_path, family, key):
    sizes = BASE | {"architectures": [f"{family}ForCausalLM"], "num_key_value_heads": 2}
    sizes |= {"sliding_window": 9, "max_window_layers": 0}
    absent, null = read(tmp_path, sizes), read(tmp_path, sizes | {key: None})
    assert replace(null, extra={}) == replace(absent, extra={})
    assert sliding_windows(null, "") == sliding_windows(absent, "")


def test_layers_have_the_windows_that_transformers_gives_them(tmp_path):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
    sizes, name = SIZES | heads, {"architectures": ["Qwen3ForCausalLM"]}
    for changes in (
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ):
        config, theirs = read(tmp_path, sizes | name | changes), Qwen3Config(**sizes, **changes)
        windows = [
            theirs.sliding_window if kind == "sliding_attention" else None
            for kind in theirs.layer_types
        ]
        assert sliding_windows(config, "") == windows


def test_old_and_new_rope_settings_mean_the_same(tmp_path):
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    new = BASE | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}}
    old = BASE | {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}}
    found = [read(tmp_path, config).rope for config in (new, old)]
    for rope in found:
        rope.pop("type", None)
    assert found[0] == found[1] == {"rope_type": "yarn", "rope_theta": 5e5, **scaling}


def test_old_rope_settings_go_before_new_ones(tmp_path):
    """As in transformers: READMEs say to add ``rope_scaling``, whatever the file already has."""
    added = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    config = BASE | new | {"rope_scaling": added}
    theirs = LlamaConfig(**json.loads(json.dumps(config | {"architectures": None})))
    assert read(tmp_path, config).rope == theirs.rope_parameters


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen2VLForConditionalGeneration", Qwen2VLTextConfig),
        ("Qwen2_5_VLForConditionalGeneration", Qwen2_5_VLTextConfig),
        ("Qwen3VLForConditionalGeneration", Qwen3VLTextConfig),
        ("Mistral3ForConditionalGeneration", MistralConfig),
        ("Mistral3ForConditionalGeneration", Ministral3Config),
    ],
)
def test_a_text_config_of_few_keys_implies_what_its_class_does(tmp_path, name, text):
    """Older versions of transformers left out of a nested config what its class has anyway."""
    sizes = SIZES | {"num_attention_heads": 32}
    given = {"model_type": text.model_type, **sizes}
    found, theirs = read(tmp_path, {"architectures": [name], "text_config": given}), text(**sizes)
    ropes = [dict(found.rope), dict(theirs.rope_parameters)]
    for rope in ropes:
        # Another name of the type, and the length that the config has beside.
        rope.pop("type", None), rope.pop("max_position_embeddings", None)
    assert ropes[0] == ropes[1]
    assert found.rms_norm_eps == theirs.rms_norm_eps
    assert found.num_kv_heads == theirs.num_key_value_heads
    assert found.head_dim == (getattr(theirs, "head_dim", None) or 2)
    cache = ARCHITECTURES[name].caches_of(found, found.dtype, "")[0]
    assert cache.window == getattr(theirs, "sliding_window", None)


def test_another_text_decoder_of_mistral_3_is_refused_by_name(tmp_path):
    """Mistral 3 may hold any decoder that transformers knows, one with latent attention too."""
    text = BASE | {"model_type": "mistral4", "kv_lora_rank": 256}
    given = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    with pytest.raises(UnsupportedError, match="text decoder of type 'mistral4'") as caught:
        read(tmp_path, given)
    assert "ministral3" in caught.value.remedy


def test_positions_in_three_parts_are_one_for_text(tmp_path):
    """Qwen2.5-VL as it is published: the text decoder's keys at the top."""
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    name = "Qwen2_5_VLForConditionalGeneration"
    config = BASE | {"architectures": [name], "num_attention_heads": 8, "rope_scaling": rope}
    found = read(tmp_path, config | {"vision_config": {"hidden_size": 3}})
    assert found.rope["rope_type"] == "default"
    assert found.also_sees


def test_rope_settings_that_are_null_are_as_good_as_absent(tmp_path):
    given = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": None}
    for name in ("LlamaForCausalLM", "Phi3ForCausalLM"):
        rope = read(tmp_path, BASE | {"architectures": [name], "rope_parameters": given}).rope
        assert rope == {"rope_type": "default", "rope_theta": 5e5}


def test_rope_lengths_are_filled_in(tmp_path):
    rope = read(tmp_path, BASE | {"rope_scaling": {"rope_type": "yarn", "factor": None}}).rope
    assert rope["original_max_position_embeddings"] == 512
    assert rope["factor"] == 1.0
    outer = {"original_max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn"}}
    assert read(tmp_path, BASE | outer).rope["factor"] == 2.0


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "yarn", "factor": 2.5}, 1280),
        ({"rope_type": "linear", "factor": 3}, 1536),
        ({"rope_type": "linear", "factor": float("nan")}, 512),
        ({"rope_type": "linear", "factor": 0.5}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "default", "factor": 4.0}, 512),
    ],
)
def test_scaled_positions_count(tmp_path, rope, positions):
    assert read(tmp_path, BASE | {"rope_parameters": rope}).max_position_embeddings == positions


def test_end_ids_come_from_the_generation_config_first(tmp_path):
    config = BASE | {"eos_token_id": 7, "bos_token_id": 1}
    assert read(tmp_path, config).eos_token_ids == (7,)
    assert read(tmp_path, config, {"eos_token_id": None}).eos_token_ids == (7,)
    found = read(tmp_path, config, {"eos_token_id": [8, 9]})
    assert (found.eos_token_ids, found.bos_token_id) == ((8, 9), 1)
    (tmp_path / "generation_config.json").unlink()
    assert read(tmp_path, BASE).eos_token_ids == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_by_either_name(tmp_path, key):
    assert read(tmp_path, BASE | {key: "bfloat16"}).dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_a_config_without_a_dtype_has_that_of_the_weights(tmp_path, stored):
    """gpt-oss is published so. Scales and biases of routers may be fp32 beside 16 bits."""
    embedding = torch.zeros(100, 64, dtype=stored)
    tensors = {"a.weight_scale": torch.ones(3), "model.embed_tokens.weight": embedding}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read(tmp_path, BASE).dtype == stored
    assert read(tmp_path, BASE | {"dtype": None, "torch_dtype": None}).dtype == stored
    assert read(tmp_path, BASE | {"torch_dtype": "float64"}).dtype == torch.float64


def test_weights_without_a_dtype_that_is_known_change_nothing(tmp_path):
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert read(tmp_path, BASE).dtype == torch.float32
    (tmp_path / "model.safetensors").write_bytes(b"truncated")
    assert read(tmp_path, BASE).dtype == torch.float32
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    assert read(tmp_path, BASE | quantized).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"rope settings per layer type \('full_attention'\), which are not supported",
        ),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, change, message):
    with pytest.raises(UnsupportedError, match=message):
        read(tmp_path, BASE | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": "100"}, "vocab_size='100'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        ({"num_key_value_heads": 3}, "4 heads of size 16 over 3"),
        ({"head_dim": 7}, "of size 7"),
        ({"head_dim": 2**30}, "head_dim=1073741824"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"architectures": []}, "no architecture"),
        ({"rope_scaling": "yarn"}, "not an object"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is not true or false"),
        ({"attention_bias": 2}, "attention_bias=2 is not true or false"),
    ],
)
def test_impossible_settings_are_named(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, BASE | change)


def test_a_nested_text_config(tmp_path):
    """A model that also sees says dtype and tying once, for itself and its text decoder."""
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": SIZES | {"tie_word_embeddings": False, "eos_token_id": 9},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "vision_config": {"hidden_size": 3},
    }
    found = read(tmp_path, config)
    assert found.architecture == "Qwen3_5ForConditionalGeneration"
    assert found.hidden_size == BASE["hidden_size"]
    assert (found.tie_word_embeddings, found.dtype) == (True, torch.bfloat16)
    assert found.eos_token_ids == (9,)
    # As Gemma 3 is published: the end of a turn is at the top alone.
    assert read(tmp_path, config | {"eos_token_id": [9, 7]}).eos_token_ids == (9, 7)


@pytest.mark.parametrize("of_text", [True, False])
@pytest.mark.parametrize("head", ["", "lm_head.weight", "language_model.lm_head.qweight"])
def test_tying_that_a_config_says_in_two_ways_is_that_of_the_weights(tmp_path, head, of_text):
    """As transformers 5 saves Mistral 3 (vllm#51063)."""
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": SIZES | {"num_key_value_heads": 4, "tie_word_embeddings": of_text},
        "tie_word_embeddings": not of_text,
    }
    names = [name for name in ("model.language_model.embed_tokens.weight", head) if name]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert read(tmp_path, config).tie_word_embeddings == (head == "")
    # A config that says one thing is believed.
    config["tie_word_embeddings"] = of_text
    assert read(tmp_path, config).tie_word_embeddings == of_text


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, 0.25),
        ({"partial_rotary_factor": 0.5}, 0.5),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.125}, "partial_rotary_factor": 0.5},
            0.125,
        ),
    ],
)
def test_hybrids_rotate_a_part_of_a_head(tmp_path, given, wanted):
    config = BASE | {"architectures": ["Qwen3NextForCausalLM"]} | given
    assert read(tmp_path, config).rope["partial_rotary_factor"] == wanted


def test_a_device_is_no_checkpoint():
    with pytest.raises(CheckpointError, match=r"^/dev/null is not a directory"):
        read_config(Path("/dev/null"))


def test_absent_or_malformed_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_config(tmp_path)


def test_a_file_is_opened_once_for_many_tensors(tmp_path, monkeypatch):
    """Its whole header is read each time. Mapped pages count as memory, so not once for all."""
    tensors = {f"{i}": torch.full((2, 3), float(i)) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    source, opened = open_weights(tmp_path), []

    def safe_open(path, framework):
        opened.append(path)
        return safetensors.safe_open(path, framework=framework)

    monkeypatch.setattr(huggingface, "safe_open", safe_open)
    monkeypatch.setattr(huggingface, "_MAPPED_ELEMENTS", 24)
    for name, tensor in tensors.items():
        assert source.stored_dtype(name) == torch.float32
        assert torch.equal(torch.cat(list(source.chunks(name))), tensor)
    # One tensor's dtype and the rows of eight, four readings each time.
    assert len(opened) == 3


@pytest.mark.parametrize(("dtype", "num_bytes"), [("F4", 4), ("F6_E2M3", 6)])
def test_a_dtype_that_torch_lacks_is_named(tmp_path, dtype, num_bytes):
    tensor = {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, num_bytes]}
    header = json.dumps({"w": tensor}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(num_bytes)
    (tmp_path / "model.safetensors").write_bytes(data)
    source = open_weights(tmp_path)
    for read in (source.stored_dtype, lambda name: list(source.stored_chunks(name))):
        with pytest.raises(CheckpointError, match=rf"tensor w .* dtype {dtype}.* bytes \(U8\)"):
            read("w")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", lambda path: open_weights(path.parent)),
        ("pytorch_model.bin", lambda path: open_weights(path.parent)),
        ("model.gguf", read_gguf),
        ("tokenizer.json", load_tokenizer),
    ],
)
def test_a_clone_without_git_lfs_is_told_what_to_run(tmp_path, name, read):
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 4096\n")
    with pytest.raises(CheckpointError, match=rf"{name}.*Git LFS: run git lfs pull"):
        read(path)
