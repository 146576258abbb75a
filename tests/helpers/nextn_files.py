"""The tensors of NextN modules, as published checkpoints name them, and of their twins."""

from __future__ import annotations

import torch


def leave_last_layer(tensors: dict[str, torch.Tensor], last: str) -> tuple[int, int, int]:
    """Have the last layer of a target alone do something; tokens 0 and 1 are like no other.

    Returns:
        The elements of an embedding that token 0, token 1 and all others alone have.
    """
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    hidden = embedding.shape[1]
    first, second, always = hidden - 1, hidden - 2, hidden - 3
    for name, tensor in tensors.items():
        if name.startswith("model.layers.") and ("o_proj" in name or "down_proj" in name):
            if name.startswith(last):
                tensor[always:] = 0
            else:
                tensor.zero_()
    embedding[:, always:] = torch.tensor([0.5, 0.0, 0.0])
    embedding[:2] = 0
    embedding[0, first], embedding[1, second] = 1, 1
    # Vectors of this length pass a norm unchanged.
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    head[:2], head[:2, always] = 0, -1000
    for name in (f"{last}input_layernorm", "model.norm"):
        tensors[f"{name}.weight"][always:] = 1
    return first, second, always


def nextn_prefix(config) -> str:
    return f"model.layers.{config.num_hidden_layers}."


def nextn_tensors(config, tensors, seed: int) -> dict[str, torch.Tensor]:
    """A module with a layer like the last one, other weights, and the target's embedding."""
    prefix, last = nextn_prefix(config), f"model.layers.{config.num_hidden_layers - 1}."
    generator, hidden = torch.Generator().manual_seed(seed + 1), config.hidden_size
    shapes = {
        prefix + name.removeprefix(last): tensor.shape
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    norms = dict.fromkeys((f"{prefix}{one}.weight" for one in ("enorm", "hnorm")), (hidden,))
    shapes |= norms | {
        f"{prefix}shared_head.norm.weight": (hidden,),
        f"{prefix}eh_proj.weight": (hidden, 2 * hidden),
    }
    own = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 0.2)
        + float(name.endswith("norm.weight"))
        for name, shape in shapes.items()
    }
    embedding = tensors["model.embed_tokens.weight"]
    return own | {
        f"{prefix}embed_tokens.weight": embedding.clone(),
        f"{prefix}shared_head.head.weight": tensors.get("lm_head.weight", embedding).clone(),
    }
