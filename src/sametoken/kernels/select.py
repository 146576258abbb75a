"""Which bundle of kernels serves a device."""

from __future__ import annotations

import logging
import os

import torch

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.kernels.interface import Kernels
from sametoken.kernels.native.bundle import NativeKernels
from sametoken.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)

CHOICE = "SAMETOKEN_KERNELS"


def select_kernels(device: torch.device) -> Kernels:
    """The fastest bundle that works on ``device``; of CPU ones ``$SAMETOKEN_KERNELS`` names one.

    Raises:
        ConfigError: the variable names no bundle.
        UnsupportedError: the device has no kernels, or the bundle named cannot work here.
    """
    if device.type == "cuda":
        # Triton is part of CUDA builds of torch alone.
        from sametoken.kernels.triton import TritonKernels

        return TritonKernels()
    if device.type != "cpu":
        raise UnsupportedError(f"there are no kernels for device {device.type!r}", "use cpu")
    choice = os.environ.get(CHOICE)
    if choice not in (None, "", "native", "reference"):
        raise ConfigError(f"{CHOICE}={choice!r} is no bundle", "use native or reference")
    if choice == "reference":
        return ReferenceKernels()
    try:
        return NativeKernels()
    except UnsupportedError as error:
        if choice == "native":
            raise
        logger.warning(
            "%s Falling back to the reference kernels in PyTorch: same law, several times slower.",
            error,
        )
        return ReferenceKernels()
