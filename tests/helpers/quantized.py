"""Checkpoints with float8 linears in the published layouts, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from helpers.checkpoints import (
    LLAMA,
    llama_shapes,
    random_weight,
    read_checkpoint,
    write_checkpoint,
    write_llama,
)
from helpers.forward import load, logits_of
from sametoken.models.quantize import W4A16, quantize_checkpoint
from sametoken.models.rounding import float8, int4

FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
TOKEN = FLOAT | {"strategy": "token", "dynamic": True}
GROUP = FLOAT | {"strategy": "group", "group_size": 128, "dynamic": True}
STATIC = FLOAT | {"strategy": "tensor"}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "scale_dtype": "torch.float8_e4m3fn",
}


def block_config(**changes) -> dict:
    """``quantization_config`` as DeepSeek and Qwen publish it."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    } | changes


def compressed_config(strategy: str, activations: dict | None = TOKEN, **changes) -> dict:
    """``quantization_config`` as compressed-tensors writes it."""
    weights = FLOAT | {"strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group | {"output_activations": None}},
    } | changes


def scales_of(weight: torch.Tensor, strategy: str) -> torch.Tensor:
    """Scales in the stored shape: the largest element becomes 448."""
    if strategy == "tensor":
        return weight.abs().amax().reshape(1) / 448
    if strategy == "channel":
        return weight.abs().amax(1, keepdim=True) / 448
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    return padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax((1, 3)) / 448


def expanded(scale: torch.Tensor, shape: tuple[int, int], strategy: str) -> torch.Tensor:
    """Stored scales by element."""
    if strategy != "block":
        return scale.expand(shape)
    by_row = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return by_row[: shape[0], : shape[1]]


def is_projection(name: str) -> bool:
    return name.endswith("proj.weight")


def quantize_tensors(
    tensors: dict[str, torch.Tensor],
    strategy: str = "block",
    *,
    scale_name: str = "weight_scale_inv",
    chosen: Callable[[str], bool] = is_projection,
    input_scales: Iterable[float] = (),
    scale_fmt: str = "float",
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors as stored, and those that they stand for."""
    stored, meant, fixed = dict(tensors), dict(tensors), iter(input_scales)
    for name in filter(chosen, tensors):
        module, weight = name.removesuffix(".weight"), tensors[name]
        scale = scales_of(weight, strategy)
        if scale_fmt == "ue8m0":
            scale = scale.log2().ceil().exp2()
        factor = expanded(scale, tuple(weight.shape), strategy)
        stored[name] = (weight / factor).to(torch.float8_e4m3fn)
        stored[f"{module}.{scale_name}"] = scale
        meant[name] = stored[name].float() * factor
        if (value := next(fixed, None)) is not None:
            stored[f"{module}.input_scale"] = torch.tensor(value)
    return stored, meant


def gptq_llama() -> tuple[dict, dict[str, torch.Tensor]]:
    """A tiny Llama of random 4-bit linears in GPTQ's layout, with act-order."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    config = LLAMA | sizes | {"quantization_config": quantization}
    generator = torch.Generator().manual_seed(0)
    stored = {}
    for name, shape in llama_shapes(config).items():
        if not is_projection(name):
            stored[name] = random_weight(generator, *shape)
            continue
        (rows, columns), module = shape, name.removesuffix(".weight")
        groups = columns // 32

        def words(*size: int) -> torch.Tensor:
            return torch.randint(-(2**31), 2**31, size, generator=generator).to(torch.int32)

        stored[f"{module}.qweight"] = words(columns // 8, rows)
        stored[f"{module}.qzeros"] = torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)
        stored[f"{module}.scales"] = torch.rand(groups, rows, generator=generator).half() / 32
        order = torch.randperm(columns, generator=generator)
        stored[f"{module}.g_idx"] = (torch.arange(columns) // 32)[order].to(torch.int32)
    return config, stored


def require_meant(folder, config, stored, meant, quantization: dict, kernels=None):
    """The model of a quantized checkpoint; its logits are those of what the tensors stand for."""
    wanted = logits_of(load(write_checkpoint(folder / "meant", config, meant)))
    config = config | {"quantization_config": quantization}
    model = load(write_checkpoint(folder / "stored", config, stored), kernels)
    assert torch.allclose(logits_of(model), wanted, rtol=1e-4, atol=1e-4)
    return model


def write_with_lm_head(folder: Path, seed: int, scheme: str, **sizes) -> tuple[Path, Path]:
    """A tiny Llama, and a copy whose projections and lm_head are quantized."""
    plain, copy = write_llama(folder / f"plain-{seed}", seed, **sizes), folder / f"copy-{seed}"
    quantize_checkpoint(plain, copy, scheme)
    config, tensors = read_checkpoint(copy)
    (group,) = config["quantization_config"]["config_groups"].values()
    rounding = int4(group["weights"]["group_size"]) if scheme == W4A16 else float8("channel")
    config["quantization_config"]["ignore"].remove("lm_head")
    tensors |= rounding.tensors("lm_head", tensors.pop("lm_head.weight"))
    return plain, write_checkpoint(copy, config, tensors)
