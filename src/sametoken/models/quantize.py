"""Write a quantized copy of a checkpoint, in the published format of compressed-tensors.

Weights are rounded to nearest, without data. Schemes, by the names that vLLM's users know:

- ``fp8-dynamic`` (``float-quantized``): float8 e4m3, a scale per row; activations are rounded by
  token when the model runs.
- ``w4a16`` (``pack-quantized``): 4 bits, symmetric, a scale per row and group of features.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from sametoken.errors import ConfigError, UnsupportedError, in_words
from sametoken.io.files import is_there
from sametoken.models.load.files import (
    INDEX,
    files_for_a_copy,
    read_json_object,
    weight_files,
)
from sametoken.models.load.huggingface import SafetensorsSource, open_weights
from sametoken.models.load.quantization import require_unquantized
from sametoken.models.load.sources import FLOATING, require_finite
from sametoken.models.rounding import float8, int4
from sametoken.models.safetensors_file import write_safetensors
from sametoken.types.option_values import listed
from sametoken.types.units import in_units

FP8_DYNAMIC, W4A16 = "fp8-dynamic", "w4a16"
SCHEMES = (FP8_DYNAMIC, W4A16)
#: Projections; embeddings, heads, routers and gates stay as they are.
_PROJECTION = re.compile(
    r"(?P<module>.*(?:_proj(?:_with_mqa)?|\.in_proj_(?:qkv|z|qkvz)|\.experts\.\d+\.w[123]"
    r"|\.shared_mlp\.(?:in|out)put_linear))\.weight"
)
_HEAD = "lm_head"
_GROUPS = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written: linears, and bytes of weights before and after."""

    num_linears: int
    bytes_before: int
    bytes_after: int


def quantize_checkpoint(source: Path, output: Path, scheme: str) -> Quantized:
    """Write ``output``, a directory with quantized linears.

    Tokenizer, template and licence are those of ``source``; its card and figures stay behind.

    Memory holds one file of the checkpoint, as it is and quantized.

    Args:
        source: a Hugging Face directory of unquantized weights.
        output: a directory that does not exist, or is empty.
        scheme: one of ``SCHEMES``.

    Raises:
        ConfigError: the scheme is unknown, or ``output`` holds files or cannot be written.
        CheckpointError: ``source`` is no checkpoint, damaged, or holds NaN or infinities.
        UnsupportedError: it is quantized already, or has no linears that the scheme can hold.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"scheme={scheme!r} is not known", f"use one of {', '.join(SCHEMES)}")
    require_new(output)
    if source.is_file():
        raise UnsupportedError(
            f"{source} is a file, and quantizing reads Hugging Face directories", "give one"
        )
    config = read_json_object(source / "config.json")
    require_unquantized(config, str(source), "quantizing")
    tensors = open_weights(source)
    if not isinstance(tensors, SafetensorsSource):
        raise UnsupportedError(
            f"{source} holds pickled weights only", "convert them to safetensors"
        )
    linears = _linears(tensors)
    group_size = _group_size(tensors, linears, source) if scheme == W4A16 else None
    rounding = float8("channel") if group_size is None else int4(group_size)
    kept = {name.removesuffix(".weight") for name in _matrices(tensors) if name not in linears}
    # One that is the embedding is a linear to transformers, though no tensor has its name.
    config["quantization_config"] = _config(group_size, sorted(kept | {_HEAD}))
    files = weight_files(source)
    with _whole_or_none(output):
        _require_room(output, tensors, linears, 8 if group_size is None else 4)
        before, weight_map = 0, dict[str, str]()
        sizes = []
        for file in files:
            given = {name: _whole(tensors, name) for name in tensors.names_in(file)}
            stored: dict[str, Tensor] = {}
            for name, tensor in given.items():
                before += tensor.nbytes
                module = name.removesuffix(".weight")
                stored |= rounding.tensors(module, tensor) if name in linears else {name: tensor}
            sizes.append(sum(tensor.nbytes for tensor in stored.values()))
            write_safetensors(output / file.name, stored)
            weight_map |= dict.fromkeys(stored, file.name)
        for file in files_for_a_copy(source):
            shutil.copyfile(file, output / file.name)
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
            (output / INDEX).write_text(json.dumps(index), encoding="utf-8")
        (output / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return Quantized(len(linears), before, sum(sizes))


def require_new(output: Path) -> None:
    """Refuse an output that holds something, before there is any work.

    Raises:
        ConfigError: it is a file, a link to nothing, or a directory with files.
    """
    if is_there(output) and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists", "name a new directory")


def _require_room(output: Path, tensors: SafetensorsSource, linears: set[str], bits: int) -> None:
    """Refuse a disk that the weights, without the scales of linears, will not fit."""

    def bits_of(name: str) -> int:
        own = bits if name in linears else 8 * tensors.stored_dtype(name).itemsize
        return own * math.prod(tensors.shape(name))

    needed, free = sum(map(bits_of, tensors.names())) // 8, shutil.disk_usage(output).free
    if free < needed:
        raise ConfigError(
            f"{output} has room for {in_units(free)}, and the copy takes {in_units(needed)}",
            "make room or choose another directory",
        )


@contextlib.contextmanager
def _whole_or_none(output: Path) -> Iterator[None]:
    """Make the directory for the block, and remove it with all it holds if the block fails.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        # Of a link, the directory that it names.
        shutil.rmtree(output.resolve(), ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise ConfigError(
                f"{output} cannot be written ({in_words(error)})",
                "make room or choose another directory",
            ) from error
        raise


def module_of(name: str) -> str | None:
    """The module of a weight that is quantized if it is a matrix; None of other tensors."""
    match = _PROJECTION.fullmatch(name)
    return match and match["module"]


def _matrices(tensors: SafetensorsSource) -> list[str]:
    """Names of the matrices that modules have as their weight."""
    names = sorted(name for name in tensors.names() if name.endswith(".weight"))
    return [name for name in names if len(tensors.shape(name)) == 2]


def _linears(tensors: SafetensorsSource) -> set[str]:
    """Names of the weights to quantize."""
    linears = set(filter(module_of, _matrices(tensors)))
    if not linears:
        raise UnsupportedError(
            f"{tensors.location} holds no projections (*_proj.weight) to quantize",
            "use a checkpoint of a decoder, with its experts one by one",
        )
    return linears


def _group_size(tensors: SafetensorsSource, linears: set[str], source: Path) -> int:
    """The largest group that divides the features of every linear."""
    features = [tensors.shape(name)[1] for name in linears]
    size = next((one for one in _GROUPS if all(count % one == 0 for count in features)), None)
    if size is None:
        raise UnsupportedError(
            f"{source} has linears whose features no group of {listed(_GROUPS)} divides",
            f"use {FP8_DYNAMIC}",
        )
    return size


def _whole(tensors: SafetensorsSource, name: str) -> Tensor:
    shape = tensors.shape(name)
    whole = torch.cat(list(tensors.stored_chunks(name))).reshape(shape)
    if whole.dtype in FLOATING:
        require_finite(whole, name, tensors)
    return whole


def _config(group_size: int | None, ignored: list[str]) -> dict[str, Any]:
    """``quantization_config`` as compressed-tensors writes it."""
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    activations, kind = None, "pack-quantized"
    if group_size is None:
        weights = {**float8, "strategy": "channel", "dynamic": False}
        activations = {**float8, "strategy": "token", "dynamic": True}
        kind = "float-quantized"
    else:
        weights |= {"strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {"group_0": {**group, "output_activations": None, "format": kind}},
        "kv_cache_scheme": None,
    }
