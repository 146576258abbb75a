"""Tiny random Nemotron-H checkpoints under the names that the hub has, with their MTP module."""

from __future__ import annotations

from pathlib import Path

import torch

from helpers.checkpoints import HIDDEN, VOCAB, random_tensors, write_checkpoint

EPS = 1e-5
PATTERN = "ME*M-E"
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 5,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": EPS,
    "rope_theta": 10000,
    "max_position_embeddings": 160,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def nemotron_config(pattern: str = PATTERN, **changes) -> dict:
    """config.json of the older form, a pattern of letters."""
    return NEMOTRON | {"hybrid_override_pattern": pattern} | changes


def mixer_shapes(config: dict, prefix: str, letter: str) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]

    def mlp(name: str, width: int, size: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.up_proj.weight": (size, width), f"{name}.down_proj.weight": (width, size)}

    if letter == "-":
        return mlp(prefix, hidden, config["intermediate_size"])
    if letter == "*":
        q_size = config["num_attention_heads"] * config["head_dim"]
        kv_size = config["num_key_value_heads"] * config["head_dim"]
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        shapes = {f"{prefix}.{name}_proj.weight": (sizes[name], hidden) for name in sizes}
        return shapes | {f"{prefix}.o_proj.weight": (hidden, q_size)}
    if letter == "M":
        heads = config["mamba_num_heads"]
        inner = heads * config["mamba_head_dim"]
        channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
        return {
            f"{prefix}.in_proj.weight": (inner + channels + heads, hidden),
            f"{prefix}.conv1d.weight": (channels, 1, config["conv_kernel"]),
            f"{prefix}.conv1d.bias": (channels,),
            f"{prefix}.A_log": (heads,),
            f"{prefix}.D": (heads,),
            f"{prefix}.dt_bias": (heads,),
            f"{prefix}.norm.weight": (inner,),
            f"{prefix}.out_proj.weight": (hidden, inner),
        }
    count, latent = config["n_routed_experts"], config.get("moe_latent_size")
    shapes = {
        f"{prefix}.gate.weight": (count, hidden),
        f"{prefix}.gate.e_score_correction_bias": (count,),
        **mlp(f"{prefix}.shared_experts", hidden, config["moe_shared_expert_intermediate_size"]),
    }
    for expert in range(count):
        size = config["moe_intermediate_size"]
        shapes |= mlp(f"{prefix}.experts.{expert}", latent or hidden, size)
    if latent:
        shapes[f"{prefix}.fc1_latent_proj.weight"] = (latent, hidden)
        shapes[f"{prefix}.fc2_latent_proj.weight"] = (hidden, latent)
    return shapes


def mtp_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, first, last = config["hidden_size"], "mtp.layers.0", "mtp.layers.1"
    norms = (f"{first}.enorm", f"{first}.hnorm", f"{first}.norm", f"{last}.norm")
    return {
        **{f"{name}.weight": (hidden,) for name in (*norms, f"{last}.final_layernorm")},
        f"{first}.eh_proj.weight": (hidden, 2 * hidden),
        **mixer_shapes(config, f"{first}.mixer", "*"),
        **mixer_shapes(config, f"{last}.mixer", "E"),
    }


def nemotron_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """A whole checkpoint of ``nemotron_config``: target and ``mtp.*``."""
    shapes = {
        "backbone.embeddings.weight": (config["vocab_size"], config["hidden_size"]),
        "backbone.norm_f.weight": (config["hidden_size"],),
        "lm_head.weight": (config["vocab_size"], config["hidden_size"]),
    }
    for index, letter in enumerate(config["hybrid_override_pattern"]):
        prefix = f"backbone.layers.{index}"
        shapes[f"{prefix}.norm.weight"] = (config["hidden_size"],)
        shapes |= mixer_shapes(config, f"{prefix}.mixer", letter)
    return random_tensors(shapes | mtp_shapes(config), seed, factors="norm")


def write_nemotron(directory: Path, seed: int = 0, **changes) -> Path:
    config = nemotron_config(**changes)
    return write_checkpoint(directory, config, nemotron_tensors(config, seed))


def write_twin(directory: Path, seed: int = 0, pattern: str = "M*EM", **changes) -> Path:
    """A target of which attention and experts alone do something, and a module just like it.

    Row p of the module stands for row p + 1 of the target: it holds the same token, and sees all
    tokens before it but the first. So token 0 must begin every prompt: its key repels every query.
    """
    config = nemotron_config(pattern, attention_bias=True, **changes)
    tensors = nemotron_tensors(config, seed)
    hidden, head_dim, first = config["hidden_size"], config["head_dim"], pattern.index("*E")
    for name, tensor in tensors.items():
        if name.endswith("out_proj.weight"):
            tensor.zero_()

    # Token 0 alone has the last element. Vectors of length 1 pass the norm before fc unchanged.
    embedding = tensors["backbone.embeddings.weight"]
    embedding[0], embedding[:, -1] = 0, 0
    embedding[0, -1] = 1
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    tensors["mtp.layers.0.enorm.weight"] = torch.ones(hidden)
    fusion = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    tensors["mtp.layers.0.eh_proj.weight"] = fusion

    attention = f"backbone.layers.{first}.mixer"
    for name in ("q", "k", "v", "o"):
        weight = tensors[f"{attention}.{name}_proj.weight"]
        tensors[f"{attention}.{name}_proj.bias"] = torch.zeros(weight.shape[0])
    queries = tensors[f"{attention}.q_proj.weight"].view(-1, head_dim, hidden)
    queries[:, -1] = 0
    tensors[f"{attention}.q_proj.bias"].view(-1, head_dim)[:, -1] = 3
    keys = tensors[f"{attention}.k_proj.weight"].view(-1, head_dim, hidden)
    keys[:, -1], keys[:, -1, -1] = 0, -1000

    for layer in (0, 1):
        prefix = f"backbone.layers.{first + layer}."
        for name in [name for name in tensors if name.startswith(prefix)]:
            own = f"mtp.layers.{layer}.{name.removeprefix(prefix)}"
            tensors[own] = tensors[name].clone()
    final = tensors["backbone.norm_f.weight"]
    tensors["mtp.layers.1.final_layernorm.weight"] = final.clone()
    return write_checkpoint(directory, config, tensors)
