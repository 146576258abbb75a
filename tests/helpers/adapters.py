"""LoRA adapters of small checkpoints, as PEFT writes them, and the checkpoints that they make."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path, target: Path, modules: Iterable[str], rank: int = 3, seed: int = 0, **config
) -> Path:
    """Random factors, as large as the weights, of the modules that end with one of the names."""
    weights, generator, tensors = load_file(target / "model.safetensors"), torch.Generator(), {}
    generator.manual_seed(seed)
    ends = tuple(f".{one}.weight" for one in modules)
    for name in sorted(weights):
        if ".layers." in name and name.endswith(ends) and not name.startswith("mtp."):
            size, width = weights[name].shape
            own = f"base_model.model.{name.removesuffix('.weight')}"
            down = torch.randn(rank, width, generator=generator) / width**0.5
            tensors[f"{own}.lora_A.weight"] = down
            tensors[f"{own}.lora_B.weight"] = torch.randn(size, rank, generator=generator)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 0.5 * rank} | config
    return write_files(directory, tensors, config)


def write_files(directory: Path, tensors: dict[str, torch.Tensor], config: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def in_memory(adapter: Path) -> dict:
    """An adapter as a trainer has it: PEFT's tensors, and a config with sets and an enumeration."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    kind = StrEnum("PeftType", {config["peft_type"]: config["peft_type"]})
    config |= {"peft_type": kind[config["peft_type"]], "target_modules": {"q_proj", "v_proj"}}
    return {"tensors": load_file(adapter / "adapter_model.safetensors"), "config": config}


def write_merged(directory: Path, target: Path, adapter: Path) -> Path:
    """The checkpoint with an adapter added to its matrices."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors, weights = (
        load_file(adapter / "adapter_model.safetensors"),
        load_file(target / "model.safetensors"),
    )
    for name, down in factors.items():
        if match := re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", name):
            up = factors[name.replace("lora_A", "lora_B")]
            scale = config["lora_alpha"] / config["r"]
            weights[f"{match[1]}.weight"] += scale * (up.double() @ down.double()).float()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes((target / "config.json").read_bytes())
    save_file(weights, directory / "model.safetensors")
    return directory
