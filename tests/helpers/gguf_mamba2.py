"""Keys and tensors of GGUF files with layers of Mamba-2, as llama.cpp's converter writes them."""

from __future__ import annotations

import torch

ARCHITECTURES = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe")


def _found(config, *names):
    return next(config[name] for name in names if config.get(name) is not None)


def _inner(config):
    if "mamba_head_dim" in config:
        return config["mamba_num_heads"] * config["mamba_head_dim"]
    expanded = config["mamba_expand"] * config["hidden_size"]
    return config.get("mamba_d_ssm") or expanded


def add_mamba2_keys(writer, arch, config):
    writer.add_ssm_conv_kernel(_found(config, "mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(_found(config, "mamba_d_state", "ssm_state_size"))
    writer.add_ssm_group_count(_found(config, "mamba_n_groups", "n_groups"))
    writer.add_ssm_time_step_rank(_found(config, "mamba_n_heads", "mamba_num_heads"))
    writer.add_ssm_inner_size(_inner(config))
    if arch == "falcon-h1":
        return
    is_bamba = config["model_type"] == "bamba"
    writer.add_rope_scaling_finetuned(is_bamba)
    if not is_bamba:
        writer.add_context_length(2**20)
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    kinds = _kinds(config)
    kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads * (kind == "attention") for kind in kinds])
    if arch.startswith("nemotron"):
        is_moe = arch.endswith("moe")
        features = config["moe_intermediate_size" if is_moe else "intermediate_size"]
        writer.add_feed_forward_length([features * (kind == "mlp") for kind in kinds])
        if is_moe:
            writer.add_expert_weights_norm(config["norm_topk_prob"])


def _kinds(config):
    """Of each layer: attention, mlp, or mamba."""
    if pattern := config.get("hybrid_override_pattern"):
        kinds = {"*": "attention", "E": "mlp", "-": "mlp", "M": "mamba"}
        return [kinds[letter] for letter in pattern]
    indices = config.get("attn_layer_indices") or [
        index
        for index, kind in enumerate(config.get("layer_types") or ())
        if kind in ("attention", "full_attention")
    ]
    layers = range(config["num_hidden_layers"])
    return ["attention" if index in indices else "mamba" for index in layers]


def mamba2_parts(name, data, config):
    """What the converter makes of a tensor, under names of files where it is no tensor's there."""
    if name.startswith("mtp."):
        return
    if "_linear.weight" in name:
        yield from _granite_mlp(name, data, config)
        return
    if config["model_type"] == "falcon_h1":
        data = _multiplied(name, data, config)
    if name.endswith("A_log"):
        data = -data.exp()
    if name.endswith(("A_log", ".D")):
        data = data[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        data = data.unflatten(0, (_found(config, "mamba_n_groups", "n_groups"), -1))
    yield name, data.squeeze(1) if "conv1d.weight" in name else data


def _granite_mlp(name, data, config):
    has_experts, layer = config["num_local_experts"], name.split(".")[2]
    kind = "exps" if "block_sparse_moe" in name else "shexp" if has_experts else ""
    ending = f"_{kind}.weight" if kind else ".weight"
    if "output" in name:
        yield f"blk.{layer}.ffn_down{ending}", data
        return
    for part, values in zip(("gate", "up"), data.chunk(2, dim=-2), strict=True):
        yield f"blk.{layer}.ffn_{part}{ending}", values


def _multiplied(name, data, config):
    """Of Falcon-H1, whose factors are in the weights of files."""
    gate, down = config["mlp_multipliers"]
    before, key = config["attention_in_multiplier"], config["key_multiplier"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": key * before,
        "q_proj": before,
        "v_proj": before,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    kind = name.split(".")[-2]
    if kind != "in_proj":
        return data * factors.get(kind, 1.0)
    inner, state = _inner(config), config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = torch.tensor([inner, inner, state, state, config["mamba_n_heads"]])
    by_row = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes)
    return data * config["ssm_in_multiplier"] * by_row[:, None]
