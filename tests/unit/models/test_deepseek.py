"""DeepSeek's family: published sizes, what is refused, and what a layer keeps."""

from __future__ import annotations

import json
import math

import pytest
import torch

from helpers.forward import CPU, Bench, load
from helpers.latents import YARN, fixed_latent, write_latent
from sametoken.bench.memory import measure_memory
from sametoken.config import EngineConfig
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.feed_forward import GatedMLP, SparseMoE
from sametoken.models.deepseek import DeepseekV3ForCausalLM, latent_sizes
from sametoken.models.loader import read_config
from sametoken.models.registry import model_class, require_divisible
from sametoken.ops.cache_types import LatentKV
from sametoken.ops.dispatch import select_kernels

#: As published (zai-org/GLM-4.7-Flash), less what changes no size.
GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.8,
    "max_position_embeddings": 202752,
    "rope_theta": 1000000,
    "dtype": "bfloat16",
}
#: As published (moonshotai/Kimi-K2-Instruct), likewise.
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 1536,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
    },
}


def written(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def small(name: str = "deepseek_v3", **changes) -> dict:
    """A config as transformers writes it."""
    architecture = {"deepseek_v3": "DeepseekV3ForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM"}
    config = json.loads(fixed_latent(name).to_json_string())
    return config | {"architectures": [architecture[name]]} | changes


def test_glm_flash_has_its_published_size_and_keeps_576_elements_a_token(tmp_path):
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    found = measure_memory(
        EngineConfig.from_options(
            model=str(written(tmp_path, GLM_FLASH)), speculative_config=spec, device="cpu"
        )
    )
    assert 29.8e9 < found.weights / 2 < 30.1e9
    assert 0.6e9 < found.draft_weights / 2 < 0.7e9
    assert found.request.kv_per_token == 47 * 576 * 2
    assert found.request.draft_kv_per_token == 576 * 2


def test_kimi_k2_is_read_with_its_scale_and_groups(tmp_path):
    config = read_config(written(tmp_path, KIMI_K2))
    sizes = latent_sizes(config, "here")
    assert (sizes.q_rank, sizes.kv_rank, sizes.nope_dim, sizes.rope_dim) == (1536, 512, 128, 64)
    assert sizes.scale == pytest.approx((0.1 * math.log(32) + 1) ** 2 / math.sqrt(192))
    assert config.max_position_embeddings == 131072
    assert model_class("KimiK2ForCausalLM") is model_class(config.architecture)
    assert (
        DeepseekV3ForCausalLM.caches_of(config, torch.bfloat16, "here")
        == (LatentKV(512, 64, torch.bfloat16),) * 61
    )
    require_divisible(config, 8)


def test_only_a_scaled_rope_with_mscale_all_dim_scales_the_scores(tmp_path):
    plain = (12 + 8) ** -0.5
    for rope, factor in (
        (YARN, (0.1 * math.log(4) + 1) ** 2),
        (YARN | {"mscale_all_dim": 0}, 1.0),
        ({"rope_type": "default", "rope_theta": 100.0, "mscale_all_dim": 1.0}, 1.0),
    ):
        config = read_config(written(tmp_path, small(rope_parameters=rope)))
        found = latent_sizes(config, "here").scale
        assert found == pytest.approx(plain * factor)


@pytest.mark.parametrize("given", [None, False, True, ...])
def test_switches_that_are_null_are_off_and_absent_ones_on(tmp_path, given):
    """As in transformers: test_parity_families.py compares the logits."""
    config = small()
    for key in ("norm_topk_prob", "rope_interleave"):
        del config[key]
        config |= {} if given is ... else {key: given}
    written(tmp_path, config)
    layer = load(tmp_path, load_format="dummy").layers[-1]
    assert layer.mlp.routed.routing.normalise == bool(given)
    assert layer.attention.rotary.interleaved == bool(given)


def test_dense_and_sparse_layers_lie_where_the_config_says(tmp_path):
    write_latent(tmp_path / "first", "deepseek_v3", first_k_dense_replace=2)
    types = ["sparse", "dense", "sparse"]
    write_latent(tmp_path / "named", "glm4_moe_lite", mlp_layer_types=types)
    dense = [type(layer.mlp) for layer in load(tmp_path / "first").layers]
    named = [type(layer.mlp) for layer in load(tmp_path / "named").layers]
    assert dense == [GatedMLP, GatedMLP, SparseMoE]
    assert named == [SparseMoE, GatedMLP, SparseMoE]


def test_every_other_layer_may_be_sparse(tmp_path):
    """``moe_layer_freq``, which transformers does not read."""
    config = small(moe_layer_freq=2, first_k_dense_replace=0)
    model = load(written(tmp_path, config), load_format="dummy")
    kinds = [type(layer.mlp) for layer in model.layers]
    assert kinds == [SparseMoE, GatedMLP, SparseMoE]


def test_a_model_without_shared_experts_runs(tmp_path):
    config = small(n_shared_experts=None)
    model = load(written(tmp_path, config), select_kernels(CPU), load_format="dummy")
    assert Bench(model).logits([1, 2, 3], []).isfinite().all()


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, UnsupportedError, "scoring_func='softmax'"),
        ("deepseek_v3", {"n_group": 3}, CheckpointError, "8 experts in 2 of n_group=3 groups"),
        ("deepseek_v3", {"topk_group": 5}, CheckpointError, "in 5 of n_group=4 groups"),
        ("deepseek_v3", {"n_group": 8}, CheckpointError, "in 2 of n_group=8 groups"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, CheckpointError, "5 of 8 experts"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, CheckpointError, "qk_rope_head_dim=7 is odd"),
        ("deepseek_v3", {"kv_lora_rank": 2**40}, CheckpointError, "kv_lora_rank"),
        (
            "deepseek_v3",
            {"rope_parameters": YARN | {"mscale_all_dim": 1e30}},
            CheckpointError,
            "mscale_all_dim=1e\\+30 is too large",
        ),
        ("deepseek_v3", {"first_k_dense_replace": "x"}, CheckpointError, "first_k_dense_replace"),
        ("deepseek_v3", {"index_topk": 2048}, UnsupportedError, "index_topk=2048"),
        ("deepseek_v2", {"attention_bias": True}, UnsupportedError, "without q_lora_rank"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedError, "norm_topk_prob=True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedError, "topk_method='noaux_tc'"),
    ],
)
def test_impossible_and_other_settings_are_refused_by_name(tmp_path, name, changes, error, message):
    written(tmp_path, small(name, **changes))
    with pytest.raises(error, match=message) as caught:
        load(tmp_path, load_format="dummy")
    assert caught.value.remedy
