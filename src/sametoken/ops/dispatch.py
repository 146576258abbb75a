"""Choose the backend of a device once, at start-up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.ops.backend import AttentionShape, Kernels
from sametoken.ops.lookup import ngram, suffix
from sametoken.ops.model.attention.scratch import Launches
from sametoken.ops.model.latent_attention.shape import LatentShape
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.step import compact
from sametoken.ops.step import native as native_step
from sametoken.ops.step.types import StepOps

logger = logging.getLogger(__name__)

CHOICE = "SAMETOKEN_KERNELS"

Search = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations of an engine: reference, triton or native.

    Attributes:
        model: operations of models.
        step: operations of a step.
        ngram, suffix: searches of slots' tokens (``ops.lookup``).
    """

    model: Kernels
    step: StepOps
    ngram: Search
    suffix: Search


def select_backend(device: torch.device) -> Backend:
    """All operations for ``device``; chooses and raises as ``select_kernels``."""
    kernels = select_kernels(device)
    if device.type == "cpu":
        step = native_step if isinstance(kernels, NativeKernels) else compact
        return Backend(kernels, step, ngram.lookup, suffix.search)
    # Only CUDA builds of torch come with Triton.
    from sametoken.ops.lookup import ngram_triton as triton_ngram
    from sametoken.ops.lookup import suffix_triton as triton_suffix
    from sametoken.ops.step import triton as triton_step

    return Backend(kernels, triton_step, triton_ngram.lookup, triton_suffix.search)


def attention_kernels(
    kernels: str,
    shape: AttentionShape,
    dtype: torch.dtype,
    stored: torch.dtype,
    block_size: int,
    device: torch.device,
) -> str:
    """What computes attention where ``kernels`` serve: ``gluon`` on Hopper, else themselves.

    ``dtype`` is that of queries, ``stored`` that of keys and values.
    """
    if device.type == "cuda":
        from sametoken.ops.model.attention import hopper

        if hopper.serves(shape, dtype, stored, block_size, device):
            return "gluon"
    return kernels


def attention_scratch(
    shape: AttentionShape | LatentShape,
    dtype: torch.dtype,
    stored: torch.dtype,
    block_size: int,
    device: torch.device,
    launches: Launches,
) -> int:
    """The most bytes that a launch of attention on a GPU has beside its result.

    Args:
        shape: of the layer.
        dtype: of its queries.
        stored: dtype of its memory.
        block_size: positions of a block.
        device: the GPU.
        launches: what launches have at most.
    """
    # Only CUDA builds of torch come with Triton.
    from sametoken.ops.model.attention import hopper, triton
    from sametoken.ops.model.latent_attention import hopper as latent_hopper
    from sametoken.ops.model.latent_attention import tuning as latent

    if isinstance(shape, AttentionShape):
        if hopper.serves(shape, dtype, stored, block_size, device):
            return hopper.most_scratch(shape, launches)
        return triton.most_scratch(shape, dtype, launches)
    if latent_hopper.serves(shape.rank, shape.width, dtype, stored, block_size, device):
        return latent_hopper.most_scratch(shape.num_heads, launches)
    return latent.most_scratch(shape, dtype, launches)


def select_kernels(device: torch.device) -> Kernels:
    """The fastest kernels that work on ``device``; ``$SAMETOKEN_KERNELS`` overrides it on a CPU.

    Raises:
        ConfigError: the variable names no backend.
        UnsupportedError: the device has no kernels, or the named ones cannot work here.
    """
    if device.type == "cuda":
        from sametoken.ops.triton import TritonKernels, require_compiler

        require_compiler(torch.cuda.get_device_capability(device))
        return TritonKernels()
    if device.type != "cpu":
        raise UnsupportedError(f"there are no kernels for device {device.type!r}", "use cpu")
    choice = os.environ.get(CHOICE)
    if choice not in (None, "", "native", "reference"):
        raise ConfigError(f"{CHOICE}={choice!r} is no backend", "use native or reference")
    if choice == "reference":
        return ReferenceKernels()
    try:
        return NativeKernels()
    except UnsupportedError as error:
        if choice == "native":
            raise
        logger.warning(
            "%s. Falling back to the reference kernels in PyTorch, which are several times slower.",
            error,
        )
        return ReferenceKernels()
