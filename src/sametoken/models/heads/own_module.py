"""Which multi-token-prediction module a target's own checkpoint may hold."""

from __future__ import annotations

from pathlib import Path

from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.heads.nextn import NextNCheckpoint
from sametoken.models.loader import read_config
from sametoken.models.nextn_target import NextNTarget
from sametoken.models.registry import ARCHITECTURES


def open_module(directory: Path, *, load_format: str = "auto") -> MTPCheckpoint | NextNCheckpoint:
    """The module of the checkpoint's architecture, with its config read and its weights not.

    Raises:
        CheckpointError: no config, or a checkpoint without the module's weights.
        UnsupportedError: an architecture without a module, or an unsupported form of it.
    """
    config = read_config(directory, load_format=load_format)
    if issubclass(ARCHITECTURES.get(config.architecture, object), NextNTarget):
        return NextNCheckpoint(directory, load_format=load_format)
    return MTPCheckpoint(directory, load_format=load_format)
