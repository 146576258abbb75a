"""Metadata of GGUF files, as llama.cpp's converter writes it of a config.json."""

from __future__ import annotations

import math

import gguf

from helpers.gguf_mamba2 import ARCHITECTURES, add_mamba2_keys

HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
INTERLEAVED = (
    *("llama", "granite", "smollm3", "mistral3"),
    *("granitehybrid", "nemotron_h", "nemotron_h_moe"),
)


def num_modules(arch, config):
    """Modules for more tokens that the converter takes over."""
    if arch == "glm4moe" or config["model_type"] == "glm4_moe_lite":
        return config["num_nextn_predict_layers"]
    return config.get("mtp_num_hidden_layers", 0) if arch.startswith("qwen35") else 0


def add_keys(writer, arch, config):
    ropes = config.get("rope_parameters") or {"rope_type": "default", **config}
    rope = ropes.get("full_attention", ropes)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    _add_layers(writer, config["num_hidden_layers"], num_modules(arch, config))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads)
    if arch != "gemma4":
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(1 if arch == "deepseek2" else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    _add_rope_scaling(writer, config, rope)
    if arch == "deepseek2":
        _add_latent_sizes(writer, config, rope)
    elif arch == "gemma4":
        _add_sizes_by_layer(writer, config)
    elif config.get("head_dim") and arch not in ("granite", "granitehybrid", "phi3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if local := ropes.get("sliding_attention"):
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if arch in INTERLEAVED or ("partial_rotary_factor" in rope and arch != "gemma4"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    _add_optional(writer, arch, config)
    if arch in HYBRIDS or arch in ARCHITECTURES:
        add = _add_linear_sizes if arch in HYBRIDS else add_mamba2_keys
        add(writer, arch, config)


def _add_layers(writer, layers, modules):
    writer.add_block_count(layers + modules)
    if modules:
        writer.add_nextn_predict_layers(modules)


def _add_linear_sizes(writer, arch, config):
    """Of Gated DeltaNet."""
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(config["full_attention_interval"])


def _add_sizes_by_layer(writer, config):
    """Of Gemma 4."""
    types, size = config["layer_types"], config["intermediate_size"]
    pattern = [kind == "sliding_attention" for kind in types]
    own = len(types) - config["num_kv_shared_layers"]
    kv_heads = config["num_global_key_value_heads"], config["num_key_value_heads"]
    each = [kv_heads[has_window] for has_window in pattern]
    writer.add_head_count_kv(kv_heads[1] if None in kv_heads else each)
    sizes = [size * (1 + (index >= own)) for index in range(len(types))]
    writer.add_feed_forward_length(sizes if config["use_double_wide_mlp"] else size)
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(pattern)
    writer.add_key_length(config["global_head_dim"])
    writer.add_value_length(config["global_head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(config["global_head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])


def _add_latent_sizes(writer, config, rope):
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] != "deepseek_v2":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_rope_scaling(writer, config, rope):
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("longrope", "yarn"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "yarn" and "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    factor = rope.get("attention_factor")
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        times = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(times) / math.log(original))
    if factor is not None:
        writer.add_rope_scaling_attn_factors(factor)


def _add_optional(writer, arch, config):
    """Keys of config.json that are those of metadata, where there are any."""
    sliding = "sliding_attention" in (config.get("layer_types") or ()) or arch == "phi3"
    added = {
        writer.add_expert_count: ("num_local_experts", "num_experts", "n_routed_experts"),
        writer.add_expert_used_count: ("num_experts_per_tok", "moe_k", "top_k_experts"),
        writer.add_expert_group_count: ("n_group",),
        writer.add_expert_group_used_count: ("topk_group",),
        writer.add_expert_weights_scale: ("routed_scaling_factor",),
        writer.add_expert_shared_count: ("n_shared_experts", "moe_num_shared_experts"),
        writer.add_leading_dense_block_count: ("first_k_dense_replace", "moe_layer_start_index"),
        writer.add_interleave_moe_layer_step: ("moe_layer_interval",),
        writer.add_expert_shared_feed_forward_length: (
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
        writer.add_moe_latent_size: ("moe_latent_size",),
        writer.add_final_logit_softcapping: ("final_logit_softcapping",),
        writer.add_attention_scale: ("attention_multiplier",),
        writer.add_embedding_scale: ("embedding_multiplier",),
        writer.add_residual_scale: ("residual_multiplier",),
        writer.add_logit_scale: ("logits_scaling",),
    }
    for add, keys in added.items():
        # Those of Falcon-H1 are in its weights.
        given = () if arch == "falcon-h1" else keys
        value = next((config[key] for key in given if config.get(key) is not None), None)
        if value is not None:
            add(value)
    if arch == "ernie4_5-moe":
        writer.add_expert_count(config["moe_num_experts"])
    if arch == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch in ("gpt-oss", "minimax-m2"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    elif config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "glm4moe":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if sliding:
        writer.add_sliding_window(config["sliding_window"] or 0)
    if sliding and arch == "olmo2":
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(pattern)
