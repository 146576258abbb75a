"""GGUF models in several files, as llama.cpp's gguf-split and its converter write them.

The first file holds the metadata, of which the others have ``split.*`` alone; each holds some of
the tensors. ``split.no`` counts the files from 0, ``split.count`` is their number, and
``split.tensors.count`` that of the tensors of all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

from sametoken.errors import CheckpointError
from sametoken.models.load.gguf_file import MAX_ENTRIES, GGUFFile, read_gguf
from sametoken.models.load.gguf_names import PartName

#: Files of a model: ten times those of the largest in files of 1 GB.
MAX_PARTS = 1 << 12
_AGAIN = "download all its files again, from one place"
_ARCHITECTURE = "general.architecture"


def read_first(path: Path) -> GGUFFile:
    """The header of a model's only or first file.

    Raises:
        CheckpointError: as ``read_gguf``, or it is a later file of a split model.
    """
    file = read_gguf(path)
    number = file.metadata.get("split.no", 0)
    if number != 0 and _count(file) > 1:
        name = PartName.parse(path.name)
        first = "its first" if name is None else str(path.with_name(str(replace(name, number=1))))
        raise CheckpointError(
            f"{path} is a later file of a split model (split.no={short(number)})", f"give {first}"
        )
    return file


def read_model(path: Path) -> GGUFFile:
    """The header of a model's only file, or of its first with the tensors of all.

    Raises:
        CheckpointError: as ``read_gguf``, of any of the files; or one is missing, of another model,
            or has a tensor of another one.
    """
    first = read_first(path)
    count = _count(first)
    # llama-gguf-split --merge leaves a count of 0.
    if count <= 1:
        return first
    names = _names(path, count)
    total, tensors = first.metadata.get("split.tensors.count"), dict(first.tensors)
    for number, name in enumerate(names[1:], 1):
        part = read_gguf(path.with_name(name))
        _require_part(part, first, number)
        twice = next((name for name in part.tensors if name in tensors), None)
        if twice is not None:
            raise CheckpointError(
                f"{part.path} has tensor {twice}, which {tensors[twice].path.name} has too", _AGAIN
            )
        tensors |= part.tensors
        if len(tensors) > MAX_ENTRIES:
            raise CheckpointError(f"{path} and its kin have too many tensors", _AGAIN)
    if len(tensors) != total:
        raise CheckpointError(
            f"the {count} files of {path} have {len(tensors)} tensors, not "
            f"split.tensors.count={short(total)}",
            _AGAIN,
        )
    return replace(first, tensors=tensors)


def _count(file: GGUFFile) -> int:
    """The number of the model's files."""
    count = file.metadata.get("split.count", 0)
    if not isinstance(count, int) or not 0 <= count <= MAX_PARTS:
        raise CheckpointError(
            f"{file.path}: split.count={short(count)} is no number of up to {MAX_PARTS} files",
            _AGAIN,
        )
    return count


def _names(path: Path, count: int) -> list[str]:
    """The names of all files, which are there."""
    first = PartName.parse(path.name)
    if first is None or (first.number, first.count) != (1, count):
        raise CheckpointError(
            f"{path} is the first of {count} files of a split model, and is not named so",
            f"name them as gguf-split does, the first one {PartName('NAME', 1, count)}",
        )
    names = [str(replace(first, number=number)) for number in range(1, count + 1)]
    missing = next((name for name in names if not path.with_name(name).is_file()), None)
    if missing is not None:
        raise CheckpointError(
            f"{path} is the first of {count} files, of which {missing} is not there",
            "download all of them into one directory",
        )
    return names


def _require_part(part: GGUFFile, first: GGUFFile, number: int) -> None:
    """Refuse a file that is not the one of a number of the model of the first."""
    keys = ("split.count", "split.tensors.count")
    wanted: dict[str, Any] = {key: first.metadata.get(key) for key in keys}
    wanted["split.no"] = number
    if _ARCHITECTURE in part.metadata:
        wanted[_ARCHITECTURE] = first.metadata.get(_ARCHITECTURE)
    for key, value in wanted.items():
        found = part.metadata.get(key)
        if found != value:
            raise CheckpointError(
                f"{part.path} has {key}={short(found)}, where that of {first.path.name} must have "
                f"{short(value)}",
                _AGAIN,
            )
