"""Load a model from a path."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from sametoken.config import DUMMY
from sametoken.errors import CheckpointError, ConfigError
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.load.dummy import dummy_reader
from sametoken.models.load.gguf_checkpoint import GGUFCheckpoint
from sametoken.models.load.gguf_names import models_of
from sametoken.models.load.huggingface import HuggingFaceCheckpoint
from sametoken.models.load.linear_format import Quantization
from sametoken.models.load.progress import shown_while_read
from sametoken.models.load.sources import TensorSource
from sametoken.models.load.weights import WeightReader
from sametoken.models.registry import model_class, require_divisible
from sametoken.ops.backend import Kernels

#: A GGUF file whose matrices stay in the bits of its blocks.
GGUF_PACKED = "gguf-packed"
LOAD_FORMATS = ("auto", "safetensors", "gguf", GGUF_PACKED, DUMMY)
# glibc's mallopt(3): allocations above the threshold are mapped, and unmapped when freed.
_M_MMAP_THRESHOLD = -3
_WHILE_LOADING = 1 << 17
_AFTERWARDS = 1 << 25


class Checkpoint(Protocol):
    """A checkpoint's config, and access to its tensors."""

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        ...

    def open_tensors(self) -> TensorSource:
        """Open the tensors for reading one by one; errors as in ``load_model``."""
        ...

    def formats(self, *, of_module: bool = False) -> Quantization:
        """How the matrices of the model, or of its module, are stored and stay."""
        ...


def open_checkpoint(path: str | Path, *, load_format: str = "auto") -> Checkpoint:
    """Read the config of a checkpoint.

    Args:
        path: a Hugging Face directory, a GGUF file, the first one of a split model, or a directory
            with one GGUF model.
        load_format: "auto", "safetensors", "gguf", "gguf-packed", or "dummy" for a directory
            with config.json, whose weights are ignored.

    Raises:
        CheckpointError: the path or a setting is missing, malformed, or impossible.
        UnsupportedError: a setting is valid but not implemented.
        ConfigError: ``load_format`` does not fit the path.
    """
    path = Path(path)
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r} is not possible", f"use {LOAD_FORMATS}")
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist", "give a checkpoint directory or a GGUF file"
        )
    names = [file.name for file in path.glob("*.gguf")] if path.is_dir() else []
    has_config = (path / "config.json").is_file()
    as_gguf = load_format in ("gguf", GGUF_PACKED) or (
        load_format == "auto" and not has_config and (path.is_file() or bool(names))
    )
    if not as_gguf:
        if path.is_file():
            raise ConfigError(f"load_format={load_format!r} needs a directory", "give one")
        return HuggingFaceCheckpoint(path, load_format)
    if not path.is_file():
        models = models_of(names)
        if len(models) != 1:
            raise CheckpointError(
                f"{path} holds {len(models)} GGUF models",
                "give the path of one, or of its first file",
            )
        path /= models[0][0]
    return GGUFCheckpoint(path, packed=load_format == GGUF_PACKED)


def read_config(path: str | Path, *, load_format: str = "auto") -> ModelConfig:
    """The architecture of a checkpoint, without its weights; see ``open_checkpoint``."""
    return open_checkpoint(path, load_format=load_format).config


@contextmanager
def low_mmap_threshold() -> Iterator[None]:
    """Lower glibc's mmap threshold, so that freed buffers are unmapped: a sixth less peak memory.

    Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _WHILE_LOADING)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _AFTERWARDS)


@low_mmap_threshold()
def load_model(
    path: str | Path,
    *,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    load_format: str = "auto",
    parallel: TensorParallel = SINGLE_RANK,
) -> Decoder:
    """Load a checkpoint; memory peaks at its packed weights plus one fused matrix.

    On a terminal a bar on stderr shows how far it is.

    Args:
        path: as in ``open_checkpoint``.
        kernels: the backend that packs and runs the weights.
        dtype: of weights and activations.
        device: of the weights.
        max_positions: positions 0 .. max_positions - 1 can be run.
        load_format: as in ``open_checkpoint``; "dummy" makes random weights, "gguf-packed" keeps
            quantized matrices in their bits.
        parallel: the ranks that divide the weights.

    Raises:
        CheckpointError: data is missing, truncated, corrupt, of a wrong shape, or NaN.
        UnsupportedError: the architecture, a setting or a dtype is not implemented.
        ConfigError: ``max_positions`` or ``load_format`` is impossible, or the ranks cannot divide
            the model.
    """
    if max_positions < 1:
        raise ConfigError(f"max_positions={max_positions} is not possible", "use at least 1")
    checkpoint = open_checkpoint(path, load_format=load_format)
    architecture = model_class(checkpoint.config.architecture)
    require_divisible(checkpoint.config, parallel.size)
    build = partial(architecture, checkpoint.config, max_positions=max_positions)
    quantization = checkpoint.formats()
    quantization.require_products(kernels)
    if load_format == DUMMY:
        names = Decoder.dummy_names(checkpoint.config)
        return build(
            dummy_reader(Path(path), kernels, dtype, device, names, parallel, quantization)
        )
    tensors = checkpoint.open_tensors()
    with shown_while_read(tensors, dtype, leads=parallel.rank == 0) as source:
        return build(
            WeightReader(source, kernels, dtype, device, parallel, quantization=quantization)
        )
