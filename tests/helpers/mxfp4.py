"""gpt-oss checkpoints whose experts are stored in MXFP4, and what they stand for."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers.checkpoints import write_checkpoint
from helpers.families import fixed_config, random_model

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
STACKS = ("experts.gate_up_proj", "experts.down_proj")
EXPERTS_0 = "model.layers.0.mlp.experts"


def packed(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales of a [experts, in_features, rows] stack, as published."""
    count, in_features, rows = shape
    generator = torch.Generator().manual_seed(seed)
    size = (count, rows, in_features // 32, 16)
    blocks = torch.randint(256, size, generator=generator)
    scales = torch.randint(122, 126, size[:-1], generator=generator)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


def made(seed: int = 0, **changes):
    """A config, the tensors as stored, and as transformers expands them."""
    config = fixed_config("gpt_oss", **{"intermediate_size": 64, "dtype": "bfloat16"} | changes)
    meant = {
        name: tensor.bfloat16() for name, tensor in random_model(config, seed).state_dict().items()
    }
    stored = dict(meant)
    for index, name in enumerate(sorted(name for name in meant if name.endswith(STACKS))):
        blocks, scales = packed(tuple(stored.pop(name).shape), index)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    return config.to_dict() | {"architectures": ["GptOssForCausalLM"]}, stored, meant


def write_mxfp4(folder: Path, **changes) -> Path:
    config, stored, _ = made(**changes)
    return write_checkpoint(folder, config | {"quantization_config": MXFP4}, stored)
