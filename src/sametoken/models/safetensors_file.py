"""Writes safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from sametoken.io.files import replacing


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    synced: bool = False,
) -> None:
    """Write a file that all users may read; under its name it is whole or not there.

    Args:
        path: the file to create or replace.
        tensors: by name.
        metadata: beside the format, for the file's header.
        synced: as for ``replacing``.

    Raises:
        OSError, SafetensorError: it cannot be written; an older file stays as it was.
    """
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(path, synced=synced) as unfinished:
        save_file(stored, unfinished, metadata={"format": "pt", **(metadata or {})})
        # safetensors leaves it to its owner alone.
        unfinished.chmod(0o644)
