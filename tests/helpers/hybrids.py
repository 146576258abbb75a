"""Tiny random hybrid checkpoints under the names that the hub has, with their MTP module."""

from __future__ import annotations

from pathlib import Path

import torch

from helpers.checkpoints import HIDDEN, VOCAB, random_tensors, write_checkpoint

LINEAR, FULL = "linear_attention", "full_attention"
EPS = 1e-6
HYBRID = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "rms_norm_eps": EPS,
    "max_position_embeddings": 160,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
#: As an argument of transformers' configs, which know the rest.
TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": [LINEAR, FULL, LINEAR],
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "norm_topk_prob": True,
}
ROPE = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
MTP = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}


def hybrid_config(kind: str, **changes) -> dict:
    """config.json of Qwen3.5 (``qwen3_5``, nested) or of Qwen3-Next (``qwen3_next``)."""
    if kind == "qwen3_next":
        rope = {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}
        names = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
        return HYBRID | EXPERTS | rope | names | changes
    text = HYBRID | MTP | {"model_type": "qwen3_5_text", "rope_parameters": ROPE} | changes
    return {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}


def mlp_shapes(config: dict, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]

    def gated(name: str, size: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{name}.gate_proj.weight": (size, hidden),
            f"{name}.up_proj.weight": (size, hidden),
            f"{name}.down_proj.weight": (hidden, size),
        }

    if "num_experts" not in config:
        return gated(prefix, config["intermediate_size"])
    shapes = {
        f"{prefix}.gate.weight": (config["num_experts"], hidden),
        f"{prefix}.shared_expert_gate.weight": (1, hidden),
    }
    for expert in range(config["num_experts"]):
        shapes |= gated(f"{prefix}.experts.{expert}", config["moe_intermediate_size"])
    return shapes | gated(f"{prefix}.shared_expert", config["shared_expert_intermediate_size"])


def attention_shapes(config: dict, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    return {
        f"{prefix}.q_proj.weight": (2 * q_size, hidden),
        f"{prefix}.k_proj.weight": (kv_size, hidden),
        f"{prefix}.v_proj.weight": (kv_size, hidden),
        f"{prefix}.o_proj.weight": (hidden, q_size),
        f"{prefix}.q_norm.weight": (head_dim,),
        f"{prefix}.k_norm.weight": (head_dim,),
    }


def linear_shapes(config: dict, prefix: str, interleaved: bool) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    if interleaved:
        projections = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    else:
        projections = {
            "in_proj_qkv": 2 * keys + values,
            "in_proj_z": values,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
    shapes = {f"{prefix}.{name}.weight": (rows, hidden) for name, rows in projections.items()}
    return shapes | {
        f"{prefix}.A_log": (heads,),
        f"{prefix}.dt_bias": (heads,),
        f"{prefix}.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        f"{prefix}.norm.weight": (config["linear_value_head_dim"],),
        f"{prefix}.out_proj.weight": (hidden, values),
    }


def layer_shapes(config: dict, prefix: str, mixer: dict) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        **mixer,
        **mlp_shapes(config, f"{prefix}.mlp"),
    }


def mtp_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, prefix = config["hidden_size"], "mtp.layers.0"
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        **layer_shapes(config, prefix, attention_shapes(config, f"{prefix}.self_attn")),
    }


def root_of(config: dict) -> str:
    """What the names of the target's tensors begin with."""
    return "model.language_model" if "text_config" in config else "model"


def hybrid_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """A whole checkpoint of ``hybrid_config``: target and ``mtp.*``, experts one by one."""
    text = config.get("text_config", config)
    root, interleaved = root_of(config), config.get("model_type") == "qwen3_next"
    shapes = {
        f"{root}.embed_tokens.weight": (text["vocab_size"], text["hidden_size"]),
        f"{root}.norm.weight": (text["hidden_size"],),
        "lm_head.weight": (text["vocab_size"], text["hidden_size"]),
    }
    for index, kind in enumerate(text["layer_types"]):
        prefix = f"{root}.layers.{index}"
        if kind == FULL:
            mixer = attention_shapes(text, f"{prefix}.self_attn")
        else:
            mixer = linear_shapes(text, f"{prefix}.linear_attn", interleaved)
        shapes |= layer_shapes(text, prefix, mixer)
    # Other norms add 1 to their weights.
    return random_tensors(shapes | mtp_shapes(text), seed, factors="linear_attn.norm")


def merged_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every layer's experts in two tensors, as Qwen3.5 is published."""
    merged, stacks = {}, {}
    for name, tensor in tensors.items():
        base, is_expert, rest = name.partition(".mlp.experts.")
        if not is_expert:
            merged[name] = tensor
            continue
        expert, kind, _ = rest.split(".")
        stacks.setdefault(f"{base}.mlp.experts", {})[int(expert), kind] = tensor
    for name, parts in stacks.items():
        count = len(parts) // 3
        gate_up = [torch.cat((parts[i, "gate_proj"], parts[i, "up_proj"])) for i in range(count)]
        merged[f"{name}.gate_up_proj"] = torch.stack(gate_up)
        merged[f"{name}.down_proj"] = torch.stack([parts[i, "down_proj"] for i in range(count)])
    return merged


def write_hybrid(directory: Path, kind: str = "qwen3_5", seed: int = 0, **changes) -> Path:
    config = hybrid_config(kind, **changes)
    return write_checkpoint(directory, config, hybrid_tensors(config, seed))


def without_mtp(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}


def twin_config(kind: str = "qwen3_5", **changes) -> dict:
    """A config for ``twin_tensors``."""
    return hybrid_config(kind, attention_bias=True, **changes)


def twin_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """A target of one layer that does something, and a module that computes just the same.

    That layer is of full attention, and the module's is a copy of it. Row p of the module
    stands for row p + 1 of the target: it holds the same token, and sees all tokens before
    it but the first. So token 0 must begin every prompt: its key repels every query.
    """
    tensors = hybrid_tensors(config, seed)
    text, root = config.get("text_config", config), root_of(config)
    hidden, head_dim = text["hidden_size"], text["head_dim"]
    full = f"{root}.layers.{text['layer_types'].index(FULL)}"
    for name, tensor in tensors.items():
        own = name.startswith(f"{full}.")
        if not own and name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()

    # Token 0 alone has the last element. Vectors of length 1 pass the norm before fc unchanged.
    embedding = tensors[f"{root}.embed_tokens.weight"]
    embedding[0], embedding[:, -1] = 0, 0
    embedding[0, -1] = 1
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
    tensors["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)

    attention = f"{full}.self_attn"
    for index in range(text["num_hidden_layers"]):
        if text["layer_types"][index] == FULL:
            tensors |= _biases(text, f"{root}.layers.{index}.self_attn")
    # The last element of a head is not rotated.
    tensors[f"{attention}.q_proj.bias"].view(-1, 2 * head_dim)[:, head_dim - 1] = 3
    keys = tensors[f"{attention}.k_proj.weight"].view(-1, head_dim, hidden)
    keys[:, -1], keys[:, -1, -1] = 0, -1000
    for name in ("q_norm", "k_norm"):
        tensors[f"{attention}.{name}.weight"].fill_(2)

    for name in [name for name in tensors if name.startswith(f"{full}.")]:
        tensors["mtp.layers.0" + name.removeprefix(full)] = tensors[name].clone()
    tensors["mtp.norm.weight"] = tensors[f"{root}.norm.weight"].clone()
    return tensors


def _biases(config: dict, prefix: str) -> dict[str, torch.Tensor]:
    shapes = attention_shapes(config, prefix)
    names = [name for name in shapes if name.endswith("proj.weight")]
    return {name.replace(".weight", ".bias"): torch.zeros(shapes[name][0]) for name in names}
