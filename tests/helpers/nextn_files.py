"""The tensors of NextN modules, as published checkpoints name them."""

from __future__ import annotations

import torch


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
