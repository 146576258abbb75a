"""Trained decoders on disk: in the form that is published, and out of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sametoken.core.directory_lock import LOCK
from sametoken.errors import CheckpointError, ConfigError
from sametoken.models.huggingface import INDEX, SINGLE
from sametoken.models.loader import open_checkpoint
from sametoken.models.mtp_checkpoint import PREFIX
from sametoken.train.decoder_network import DecoderNetwork

_NESTED = "model.language_model."
_FIRST_SHARD, _MTP_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@torch.no_grad()
def load_decoder(path: Path, *, max_positions: int, mtp: bool = False) -> DecoderNetwork:
    """A decoder with a checkpoint's weights, in fp32; the module's are left as they are made.

    Args:
        path: a checkpoint directory or a GGUF file.
        max_positions: as in ``DecoderNetwork``.
        mtp: with a module for further tokens.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the config wants.
        UnsupportedError: the architecture cannot be trained.
    """
    checkpoint = open_checkpoint(path)
    network = DecoderNetwork(checkpoint.config, max_positions=max_positions, mtp=mtp)
    source = checkpoint.open_tensors()
    names = set(source.names())
    for name, parameter in network.named_parameters():
        if name.startswith(f"{PREFIX}."):
            continue
        stored = name.replace("model.", _NESTED, 1)
        stored = stored if stored in names else name
        if stored not in names or source.shape(stored) != tuple(parameter.shape):
            raise CheckpointError(
                f"{path} holds no tensor {name} of shape {list(parameter.shape)}",
                "check that config and weights belong together",
            )
        parameter.copy_(torch.cat(list(source.chunks(stored))))
    return network


def write_decoder(
    directory: Path, config: dict[str, Any], network: DecoderNetwork, dtype: torch.dtype
) -> None:
    """Write config.json and model.safetensors; the network takes the rounded weights itself.

    Raises:
        ConfigError: the directory cannot be written.
    """
    tensors = {}
    for name, parameter in network.named_parameters():
        rounded = parameter.detach().to(dtype)
        parameter.data.copy_(rounded)
        tensors[name] = rounded.cpu()
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    _save(tensors, directory / SINGLE)
    _write_text(directory / "config.json", text)


def write_with_module(source: Path, directory: Path, network: DecoderNetwork) -> None:
    """Copy a checkpoint and put its module for further tokens, in bf16, beside its weights.

    The weights are copied as they stand; a module that they hold already is no longer named
    by the index. The network takes the rounded weights itself.

    Raises:
        ConfigError: the directory cannot be written.
        CheckpointError: a file of weights cannot be read.
    """
    tensors = {}
    for name, parameter in network.mtp.named_parameters():
        rounded = parameter.detach().to(torch.bfloat16)
        parameter.data.copy_(rounded)
        tensors[f"{PREFIX}.{name}"] = rounded.cpu()
    _save(tensors, directory / _MTP_SHARD)
    files: dict[str, str] = {}
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name in (INDEX, _MTP_SHARD, LOCK):
            continue
        # Under its usual name a single file would be read without the index.
        name = _FIRST_SHARD if path.name == SINGLE else path.name
        _copy(path, directory / name)
        if path.suffix == ".safetensors":
            kept = [key for key in _names_in(path) if not key.startswith(f"{PREFIX}.")]
            files |= dict.fromkeys(kept, name)
    files |= dict.fromkeys(tensors, _MTP_SHARD)
    _write_text(directory / INDEX, json.dumps({"metadata": {}, "weight_map": files}, indent=1))


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is truncated or corrupt ({error})", "fetch or convert it again"
        ) from error


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    except (OSError, SafetensorError) as error:
        raise _not_written(path, error) from error


def _copy(source: Path, path: Path) -> None:
    try:
        shutil.copyfile(source, path)
    except OSError as error:
        raise _not_written(path, error) from error


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error})", "make room or choose another output")
