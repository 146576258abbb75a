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


def write_stacks(
    directory: Path, target: Path, rank: int = 3, seed: int = 0, *, turned: bool = False
) -> Path:
    """Random factors of all gated experts of each layer in one module, as PEFT has parameters'.

    Args:
        turned: as PEFT 0.17 and 0.18 have those of matrices whose rows are outputs.
    """
    weights, generator, tensors = load_file(target / "model.safetensors"), torch.Generator(), {}
    generator.manual_seed(seed)
    hidden = json.loads((target / "config.json").read_text())["hidden_size"]
    layers = {match[1]: None for name in sorted(weights) if (match := _EXPERTS.match(name))}
    for experts in layers:
        downs = [
            one for name, one in weights.items() if _DOWN.fullmatch(name.removeprefix(experts))
        ]
        count = len(downs) if downs[0].dim() == 2 else len(downs[0])
        inner = sum(one.numel() for one in downs) // count // hidden
        for wrapped, shape in ((".base_layer", (2 * inner, hidden)), ("", (hidden, inner))):
            size, width = shape[::-1] if turned else shape
            own = f"base_model.model.{experts}{wrapped}"
            down = torch.randn(count * rank, width, generator=generator) / width**0.5
            tensors[f"{own}.lora_A.weight"] = down
            up = torch.randn(size, rank * count, generator=generator)
            tensors[f"{own}.lora_B.weight"] = up / 2
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 0.5 * rank}
    parameters = ["experts.down_proj", "mlp.experts.gate_up_proj", "experts.gate_up_proj"]
    return write_files(directory, tensors, config | {"target_parameters": parameters})


_EXPERTS = re.compile(r"(.*\.layers\.\d+\.(?:\w+\.)?experts)\.")
_DOWN = re.compile(r"\.(?:down_proj|\d+\.(?:down_proj|w2)\.weight)")


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
    config |= {"target_parameters": {*config.get("target_parameters", ())}}
    return {"tensors": load_file(adapter / "adapter_model.safetensors"), "config": config}


def write_merged(directory: Path, target: Path, adapter: Path, *, turned: bool = False) -> Path:
    """The checkpoint with an adapter added to its matrices; ``turned`` as for ``write_stacks``."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors, weights = (
        load_file(adapter / "adapter_model.safetensors"),
        load_file(target / "model.safetensors"),
    )
    for name, down in factors.items():
        if match := re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", name):
            up = factors[name.replace("lora_A", "lora_B")]
            scale = config["lora_alpha"] / config["r"]
            if stack := re.fullmatch(r"(.*\.experts)(\.base_layer)?", match[1]):
                first = down.double().unflatten(0, (-1, config["r"]))
                second = up.double().unflatten(1, (config["r"], -1))
                added = scale * torch.einsum("ore,eri->eoi", second, first).float()
                names = ("gate", "up") if stack[2] else ("down",)
                _add_to_experts(weights, stack[1], names, added.mT if turned else added)
            else:
                weights[f"{match[1]}.weight"] += scale * (up.double() @ down.double()).float()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes((target / "config.json").read_bytes())
    save_file(weights, directory / "model.safetensors")
    return directory


def _add_to_experts(weights, experts: str, names: tuple[str, ...], added: torch.Tensor) -> None:
    """Add to matrices [E, out, in], stored one by one, or together either way round."""
    together = weights.get(f"{experts}.{'_'.join(names)}_proj")
    if together is not None:
        together += added if added.shape == together.shape else added.mT
        return
    for name, part in zip(names, added.chunk(len(names), dim=1), strict=True):
        for index, own in enumerate(part):
            weights[f"{experts}.{index}.{name}_proj.weight"] += own
