"""Tiny checkpoints that compressed-tensors itself quantizes and writes, and its own logits."""

from __future__ import annotations

import copy
import warnings

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


def tiny_llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | changes, dtype="float32")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
                if "embed" not in name:
                    # Rows of unlike sizes, so that a scale at the wrong row is seen.
                    parameter.mul_(torch.linspace(0.2, 3, parameter.shape[0])[:, None])
    return model


def scales_of(weight: torch.Tensor, args, module=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's scales and zero points of a weight, by its strategy."""
    from compressed_tensors.quantization.utils import calculate_qparams

    if args.strategy == "tensor":
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif args.strategy in ("group", "tensor_group"):
        grouped = weight.unflatten(1, (-1, args.group_size))
        low, high = grouped.amin(2), grouped.amax(2)
    else:
        padded = torch.nn.functional.pad(
            weight, (0, -weight.shape[1] % 128, 0, -weight.shape[0] % 128)
        )
        blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    return calculate_qparams(low, high, args, getattr(module, "weight_global_scale", None))


def written(folder, groups: dict, ignore=("lm_head",), token_ids=(), **changes):
    """Quantize ``tiny_llama`` and save it to ``folder``; the library's logits of the tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _written(folder, copy.deepcopy(groups), list(ignore), list(token_ids), changes)


@torch.no_grad()
def _written(folder, groups, ignore, token_ids, changes):
    model = tiny_llama(**changes)
    compressor = _quantized(model, groups, ignore)
    logits = model(torch.tensor([token_ids])).logits[0] if token_ids else None
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return logits


@torch.no_grad()
def compressed(folder, groups: dict, ignore=()) -> dict[str, torch.Tensor]:
    """Quantize the matrices of a checkpoint in place; the tensors that it then stands for."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, module, _ = ["", *name.split(".")]
        if tensor.dim() == 2 and not name.startswith("embed"):
            place = model
            for part in path[1:]:
                place.add_module(part, place._modules.get(part, torch.nn.Module()))
                place = place.get_submodule(part)
            linear = torch.nn.Linear(*reversed(tensor.shape), bias=False, dtype=tensor.dtype)
            linear.weight.copy_(tensor)
            place.add_module(module, linear)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressor = _quantized(model, copy.deepcopy(groups), list(ignore))
        compressor.compress_model(model)
        stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        compressor.update_config(str(folder))
        compressor.decompress_model(model)
    others = {name: tensor for name, tensor in tensors.items() if name not in model.state_dict()}
    save_file(others | stored, file)
    meant = {name: one for name, one in model.state_dict().items() if name in tensors}
    return others | meant


def _quantized(model: torch.nn.Module, groups: dict, ignore: list[str]):
    """Give a model's linears the scales of their groups; what compresses it."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import generate_gparam

    config = QuantizationConfig(config_groups=groups, ignore=ignore)
    apply_quantization_config(model, config)
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            continue
        if scheme.weights.strategy == "tensor_group":
            largest = module.weight.amin().reshape(1), module.weight.amax().reshape(1)
            module.weight_global_scale.copy_(generate_gparam(*largest))
        scale, zero = scales_of(module.weight, scheme.weights, module)
        module.weight_scale.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.copy_(zero)
        if hasattr(module, "input_scale"):
            # Unlike for each module, so that fused ones must not share one.
            module.input_scale.fill_(0.01 + 0.002 * (len(name) % 5))
        module.quantization_status = QuantizationStatus.FROZEN
    return ModelCompressor.from_pretrained_model(model)
