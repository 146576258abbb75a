"""Small random models with latent attention, and NextN modules for them."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig

from helpers.checkpoints import change_tensors
from helpers.families import VOCAB, random_model
from helpers.nextn_files import leave_last_layer, nextn_prefix, nextn_tensors

#: Sizes that two ranks divide; no two of a head's sizes are equal.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
V3_GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
ROPES = (
    {"rope_type": "default", "rope_theta": 100.0},
    YARN,
    YARN | {"mscale": 1.0},
    {key: value for key, value in YARN.items() if not key.startswith("mscale")},
)


def deepseek_v2(draw) -> dict:
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    return draw(st.sampled_from([{"topk_method": "greedy"}, groups])) | {
        "first_k_dense_replace": draw(st.integers(0, 3))
    }


def deepseek_v3(draw) -> dict:
    return draw(st.sampled_from([V3_GROUPS, {"n_group": 1, "topk_group": 1}])) | {
        "first_k_dense_replace": draw(st.integers(0, 3)),
        "rope_interleave": draw(st.booleans()),
        "norm_topk_prob": draw(st.booleans()),
    }


def glm4_moe_lite(draw) -> dict:
    types = st.lists(st.sampled_from(["dense", "sparse"]), min_size=3, max_size=3)
    return draw(st.sampled_from([{}, V3_GROUPS])) | {
        "mlp_layer_types": draw(types),
        "rope_interleave": draw(st.booleans()),
    }


#: By name: the config class, what a drawn config adds to the sizes, and what the fixed one adds.
LATENTS = {
    "deepseek_v2": (
        DeepseekV2Config,
        deepseek_v2,
        {"q_lora_rank": None, "first_k_dense_replace": 1, "rope_parameters": ROPES[0]},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        deepseek_v3,
        V3_GROUPS | {"first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, glm4_moe_lite, {"rope_parameters": ROPES[0]}),
}


def drawn_latent(draw, name: str):
    """A random config of the class."""
    config_class, own, _ = LATENTS[name]
    changes = {
        "q_lora_rank": draw(st.sampled_from([None, 20])),
        "n_shared_experts": draw(st.integers(1, 2)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(st.sampled_from(ROPES)),
    }
    return config_class(**SIZES | changes | own(draw))


def fixed_latent(name: str, **changes):
    config_class, _, own = LATENTS[name]
    return config_class(**SIZES | own | changes)


def write_latent(directory: Path, name: str, seed: int = 0, **changes) -> Path:
    random_model(fixed_latent(name, **changes), seed).save_pretrained(directory)
    return directory


def write_nextn(directory: Path, name: str = "deepseek_v3", seed: int = 0, **changes) -> Path:
    """A random model and a random NextN module, whose embedding and head are copies."""
    config = fixed_latent(name, num_nextn_predict_layers=1, **changes)
    random_model(config, seed).save_pretrained(directory)
    return change_tensors(directory, lambda old: old | nextn_tensors(config, old, seed))


def write_twin(directory: Path, name: str = "glm4_moe_lite", seed: int = 0) -> Path:
    """A target whose last layer alone does something, and a module that computes the same.

    Row p of the module stands for row p + 1 of the target: it holds the same token and sees all
    tokens before it but the first two. The first is not there; row 0, of the second, has a zeroed
    embedding. So tokens 0 and 1 must begin every prompt: their keys repel every query, and
    no token is like them. Of row 0 the module knows from the target's state that token 0 is there.
    """
    write_nextn(directory, name, seed, tie_word_embeddings=False, q_lora_rank=None)
    path = directory / "model.safetensors"
    config, tensors = fixed_latent(name, q_lora_rank=None), load_file(path)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    first, second, always = leave_last_layer(tensors, last)

    # One element of every query is as large as ``always``; it meets that of repelling keys.
    attention, nope = f"{last}self_attn.", config.qk_nope_head_dim
    queries = tensors[f"{attention}q_proj.weight"].view(config.num_attention_heads, -1, 32)
    queries[:, 0], queries[:, 0, always] = 0, 10
    rank = config.kv_lora_rank
    latents = tensors[f"{attention}kv_a_proj_with_mqa.weight"]
    latents[rank - 1], latents[rank - 1, second:] = 0, 10
    tensors[f"{attention}kv_a_layernorm.weight"][rank - 1] = 1
    keys = tensors[f"{attention}kv_b_proj.weight"].view(config.num_attention_heads, -1, rank)
    keys[..., rank - 1] = 0
    keys[:, 0, : rank - 1], keys[:, 0, rank - 1] = 0, -1000
    assert nope > 1

    prefix = nextn_prefix(config)
    for key in [key for key in tensors if key.startswith(last)]:
        tensors[prefix + key.removeprefix(last)] = tensors[key].clone()
    for key in ("enorm", "hnorm"):
        tensors[f"{prefix}{key}.weight"] = torch.ones(config.hidden_size)
    of_hidden = torch.zeros(config.hidden_size, config.hidden_size)
    of_hidden[second, first] = 1
    tensors[f"{prefix}eh_proj.weight"] = torch.cat((torch.eye(config.hidden_size), of_hidden), 1)
    tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path)
    return directory
