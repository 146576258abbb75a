"""Small ERNIE 4.5 and MiMo checkpoints with their modules, as published ones name the tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import change_config, change_tensors, layer_shapes, random_tensors
from helpers.families import write_family
from helpers.nextn_files import leave_last_layer

ERNIE, MIMO = "ernie4_5_moe", "mimo"
ARCHITECTURES = {ERNIE: "Ernie4_5_MoeForCausalLM", MIMO: "MiMoForCausalLM"}
#: Of the embedding's norm, the state's, the projection of both, and the layer.
NAMES = {
    ERNIE: ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0",
            "model.mtp_block.0"),
    MIMO: ("model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm",
           "model.mtp_layers.0.input_proj", "model.mtp_layers.0"),
}  # fmt: skip
MIMO_NORM = "model.mtp_layers.0.final_layernorm"


def module_tensors(kind: str, config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random module for a target of these sizes."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    *norms, fusion, layer = NAMES[kind]
    shapes = layer_shapes(config, layer, hidden)
    if kind == MIMO:
        norms.append(MIMO_NORM)
        for name in "qkv":
            count = config["num_attention_heads" if name == "q" else "num_key_value_heads"]
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (count * head_dim,)
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    shapes[f"{fusion}.weight"] = (hidden, 2 * hidden)
    return random_tensors(shapes, seed)


def write_module(directory: Path, kind: str, seed: int = 0, **changes) -> Path:
    """A random target, for MiMo transformers' Qwen2, and a random module."""
    family = "qwen2" if kind == MIMO else kind
    write_family(directory, family, seed, num_nextn_predict_layers=1, head_dim=8, **changes)
    change_config(directory, architectures=[ARCHITECTURES[kind]], model_type=kind)
    config = json.loads((directory / "config.json").read_text())
    return change_tensors(directory, lambda old: old | module_tensors(kind, config, seed))


def write_twin(directory: Path, kind: str, seed: int = 0) -> Path:
    """A target whose last layer alone does something, and a module that computes the same.

    Row p of the module stands for row p + 1 of the target: it holds the same token and sees all
    tokens before it but the first two, which must begin every prompt: their keys repel every
    query, and no token is like them. MiMo zeroes the embedding of row 0, of the second one: that
    the first one is there the module knows from the target's state.
    """
    # The last elements of a head are hardly rotated.
    rope = {"rope_type": "default", "rope_theta": 1e9}
    dense_last = {"moe_layer_end_index": 1} if kind == ERNIE else {}
    write_module(
        directory, kind, seed, tie_word_embeddings=False, rope_parameters=rope, **dense_last
    )
    file = directory / "model.safetensors"
    tensors, last = load_file(file), "model.layers.2."
    first, second, always = leave_last_layer(tensors, last)
    hidden = tensors["model.embed_tokens.weight"].shape[1]

    # One element of every query is as large as ``always``; it meets that of repelling keys.
    element = 6 if kind == ERNIE else 3
    queries, keys = (
        tensors[f"{last}self_attn.{name}_proj.weight"].view(-1, 8, hidden) for name in "qk"
    )
    queries[:, element], queries[:, element, always] = 0, 10
    keys[:, element], keys[:, element, second:] = 0, -1000

    *norms, fusion, layer = NAMES[kind]
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[f"{layer}.{name.removeprefix(last)}"] = tensors[name].clone()
    for name in norms:
        tensors[f"{name}.weight"] = torch.ones(hidden)
    of_state = torch.zeros(hidden, hidden)
    of_state[second, first] = 1
    halves = (torch.eye(hidden), of_state)
    tensors[f"{fusion}.weight"] = torch.cat(halves if kind == ERNIE else halves[::-1], 1)
    if kind == MIMO:
        tensors[f"{MIMO_NORM}.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, file)
    return directory
