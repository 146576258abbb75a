"""Hidden states on disk: safetensors shards, and a manifest of their contents.

A directory holds ``manifest.json`` and shards of R rows each: ``hidden_states``
[R, num_layers, hidden] in the model's dtype, ``token_ids`` [R] and ``next_token_ids`` [R]
int64. A row is a position's states, its token, and the token after it. The manifest lists the
ranges of positions in each shard, in order. Names and layer ids are those of vLLM's
``extract_hidden_states`` method: layer i is the input of layer i, ``num_hidden_layers`` the
input of the final norm.

Every file is written to a temporary name and then renamed, a shard before the manifest that
lists it, so after a crash every listed shard exists. The manifest records each shard's run and
SHA-256; a shard with other bytes is refused when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sametoken.errors import CheckpointError, ConfigError, in_words
from sametoken.io.files import replacing
from sametoken.io.json_text import parse_json
from sametoken.models.safetensors_file import write_safetensors

FORMAT = "sametoken-hidden-states-2"
MANIFEST = "manifest.json"
_AGAIN = "extract the states again, into an empty directory"
_PLAIN_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Bytes of a row's two token ids.
_ROW_IDS = 16


@dataclass(frozen=True, slots=True)
class StateSource:
    """The source of the states; states of different sources cannot share a directory.

    Attributes:
        model: path of the checkpoint.
        eagle_aux_hidden_state_layer_ids: the layers, in the order of ``hidden_states``.
        dtype: dtype of the states, for example "bfloat16".
    """

    model: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    eagle_aux_hidden_state_layer_ids: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class SequenceEntry:
    """One request's sequence: ``num_rows`` positions from 0 on, one fewer than its tokens.

    Attributes:
        request_id: the engine's; another run may reuse it.
        prompt_digest: ``prompt_digest`` of the prompt.
        prompt_len: tokens of the prompt.
        num_rows: positions that are written.
        complete: the request finished and all its rows are written. After an abort, NaN logits
            or the end of the process, a sequence stays incomplete.
    """

    request_id: str
    prompt_digest: str
    prompt_len: int
    num_rows: int
    complete: bool


@dataclass(frozen=True, slots=True)
class RowRange:
    """Positions ``start .. stop - 1`` of the sequence with that index in the manifest."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A file and the ranges in it, in order.

    Attributes:
        file: its name within the directory.
        writer: the id of the run that wrote it, also stored in the file.
        sha256: digest of the whole file, in hexadecimal.
    """

    file: str
    writer: str
    sha256: str
    ranges: tuple[RowRange, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all ranges."""
        return sum(part.stop - part.start for part in self.ranges)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a directory.

    Attributes:
        complete: no request was running when this was written.
    """

    source: StateSource
    complete: bool = True
    sequences: tuple[SequenceEntry, ...] = ()
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True)
class ExtractedSequence:
    """One sequence for a trainer.

    Attributes:
        token_ids: [n] int64, prompt and output.
        hidden_states: [n - 1, num_layers, hidden]; the last token was not computed.
        prompt_len: number of leading prompt tokens.
    """

    request_id: str
    token_ids: Tensor
    hidden_states: Tensor
    prompt_len: int


class ExtractedStates:
    """The complete sequences of a directory by index, in the order of the manifest.

    Shards written after the manifest was read are not included; an engine may keep writing.

    Raises:
        CheckpointError: the manifest is missing or malformed, or a shard is too short; on
            access, a shard was modified.
    """

    def __init__(self, directory: str | Path) -> None:
        self.manifest = read_manifest(Path(directory))
        self._directory = Path(directory)
        self._complete = [i for i, one in enumerate(self.manifest.sequences) if one.complete]
        # By shard: inode, size and mtime of the file when its digest was checked.
        self._checked: dict[str, tuple[int, int, int]] = {}
        # By sequence: shards, with the range of its rows in each.
        self._places: dict[int, list[tuple[Shard, int, int]]] = {}
        for shard in self.manifest.shards:
            self._require_room(shard)
            first = 0
            for part in shard.ranges:
                last = first + part.stop - part.start
                self._places.setdefault(part.sequence, []).append((shard, first, last))
                first = last

    def __len__(self) -> int:
        return len(self._complete)

    @property
    def entries(self) -> list[SequenceEntry]:
        """What the manifest says of each sequence, by index."""
        return [self.manifest.sequences[sequence] for sequence in self._complete]

    def __getitem__(self, index: int) -> ExtractedSequence:
        sequence = self._complete[index]
        entry = self.manifest.sequences[sequence]
        parts = [self._read(*place) for place in self._places[sequence]]
        states, tokens, following = (torch.cat(part) for part in zip(*parts, strict=True))
        token_ids = torch.cat((tokens, following[-1:]))
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= self.manifest.source.vocab_size:
            raise CheckpointError(
                f"sequence {entry.request_id!r} of {self._directory} holds token ids outside "
                f"0..{self.manifest.source.vocab_size - 1}",
                _AGAIN,
            )
        return ExtractedSequence(entry.request_id, token_ids, states, entry.prompt_len)

    def _read(self, shard: Shard, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        path = self._directory / shard.file
        try:
            self._require_intact(path, shard)
            with safe_open(path, framework="pt") as file:
                states, tokens, following = (
                    file.get_slice(name)[first:last]
                    for name in ("hidden_states", "token_ids", "next_token_ids")
                )
        except (OSError, SafetensorError) as error:
            raise _damaged(path, in_words(error)) from error
        return states, tokens, following

    def _require_room(self, shard: Shard) -> None:
        """Refuse a file that is too short for its rows, before memory is allocated for them."""
        path, source = self._directory / shard.file, self.manifest.source
        elements = len(source.eagle_aux_hidden_state_layer_ids) * source.hidden_size
        row_bytes = elements * _DTYPES[source.dtype].itemsize + _ROW_IDS
        try:
            size = path.stat().st_size if path.is_file() else 0
        except OSError as error:
            raise _damaged(path, in_words(error)) from error
        if size < shard.num_rows * row_bytes:
            raise _damaged(path, f"{size} bytes for {shard.num_rows} rows of {row_bytes}")

    def _require_intact(self, path: Path, shard: Shard) -> None:
        """Compare a file with its digest in the manifest; again only if the file has changed."""
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            state = found.st_ino, found.st_size, found.st_mtime_ns
            if self._checked.get(shard.file) == state:
                return
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != shard.sha256:
            raise CheckpointError(
                f"{path} is not the file that run {shard.writer} wrote: it is truncated, edited, "
                f"or another run's ({_writer_of(path)})",
                _AGAIN,
            )
        _require_shapes(path, shard, self.manifest.source)
        self._checked[shard.file] = state


def prompt_digest(token_ids: Sequence[int]) -> str:
    """A short digest of a prompt, equal on every machine."""
    text = " ".join(map(str, token_ids))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a directory.

    Raises:
        CheckpointError: it is missing, malformed, inconsistent, or of another format.
    """
    path = directory / MANIFEST
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        text = path.read_bytes()
        found = parse_json(text)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} holds no {MANIFEST}", "give a directory of extracted hidden states"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({in_words(error)})", _AGAIN) from error
    written = found.get("format") if isinstance(found, dict) else None
    if isinstance(written, str) and written != FORMAT:
        raise CheckpointError(f"{path} is of format {written!r}", f"extract again, in {FORMAT!r}")
    try:
        source = _SOURCE.validate_json(text, strict=True)
        rest = _CONTENTS.validate_json(text, strict=True)
        manifest = Manifest(source, rest.complete, rest.sequences, rest.shards)
        _require_sound(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
        raise CheckpointError(f"{path} is malformed ({why})", _AGAIN) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is malformed ({error})", _AGAIN) from error
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest of a directory.

    Raises:
        ConfigError: the directory cannot be written.
    """
    value = {
        "format": FORMAT,
        **asdict(manifest.source),
        "complete": manifest.complete,
        "sequences": [asdict(one) for one in manifest.sequences],
        "shards": [asdict(one) for one in manifest.shards],
    }
    text = json.dumps(value, indent=1)
    path = directory / MANIFEST
    with _writing(path), replacing(path, synced=True) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_shard(
    directory: Path,
    file: str,
    writer: str,
    ranges: tuple[RowRange, ...],
    tensors: dict[str, Tensor],
) -> Shard:
    """Write a shard's file, which the next manifest must list.

    Raises:
        ConfigError: the directory cannot be written.
    """
    ranges_json = json.dumps([asdict(one) for one in ranges])
    path, metadata = directory / file, {"writer": writer, "ranges": ranges_json}
    with _writing(path):
        write_safetensors(path, tensors, metadata, synced=True)
        with path.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
    return Shard(file, writer, digest, ranges)


@dataclass(frozen=True, slots=True)
class _Contents:
    """A manifest's file without its source."""

    format: str
    complete: bool
    sequences: tuple[SequenceEntry, ...]
    shards: tuple[Shard, ...]


_SOURCE = TypeAdapter(StateSource)
_CONTENTS = TypeAdapter(_Contents)


def _require_sound(manifest: Manifest) -> None:
    """Raise ValueError unless the ranges cover the rows of the sequences exactly once."""
    source = manifest.source
    sizes = (source.vocab_size, source.hidden_size, len(source.eagle_aux_hidden_state_layer_ids))
    if min(sizes) < 1 or source.dtype not in _DTYPES:
        raise ValueError(f"states of sizes {sizes} and dtype {source.dtype!r}")
    files = Counter(shard.file for shard in manifest.shards)
    for file, count in files.items():
        if count > 1 or not _PLAIN_NAME.fullmatch(file):
            raise ValueError(f"shard {file!r} is listed {count} times, or is not a plain file name")
    num_rows = [0] * len(manifest.sequences)
    for part in (part for shard in manifest.shards for part in shard.ranges):
        known = 0 <= part.sequence < len(num_rows)
        if not known or part.start != num_rows[part.sequence] or part.stop <= part.start:
            raise ValueError(f"rows {part.start}..{part.stop - 1} of sequence {part.sequence}")
        num_rows[part.sequence] = part.stop
    for entry, found in zip(manifest.sequences, num_rows, strict=True):
        if entry.num_rows != found or not found or not entry.prompt_len >= 0:
            raise ValueError(
                f"sequence {entry.request_id!r} has {entry.num_rows} rows, the shards {found}"
            )


def _require_shapes(path: Path, shard: Shard, source: StateSource) -> None:
    rows = [shard.num_rows]
    states = [*rows, len(source.eagle_aux_hidden_state_layer_ids), source.hidden_size]
    expected = {
        "hidden_states": (states, _DTYPES[source.dtype]),
        "token_ids": (rows, torch.int64),
        "next_token_ids": (rows, torch.int64),
    }
    with safe_open(path, framework="pt") as file:
        if not expected.keys() <= set(file.keys()):
            raise _damaged(path, f"it holds {sorted(file.keys())}")
        for name, (shape, dtype) in expected.items():
            part = file.get_slice(name)
            if part.get_shape() != shape or part[:0].dtype != dtype:
                raise _damaged(path, f"{name} is {part.get_shape()} of {part.get_dtype()}")


def _writer_of(path: Path) -> str:
    """The writer stored in a file, for an error message."""
    try:
        with safe_open(path, framework="pt") as file:
            return f"its writer is {(file.metadata() or {}).get('writer')!r}"
    except (OSError, SafetensorError) as error:
        return in_words(error)


def _damaged(path: Path, why: object) -> CheckpointError:
    return CheckpointError(f"{path} is missing, truncated or corrupt ({why})", _AGAIN)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} cannot be written ({in_words(error)})",
            "make room there, or set another shared_storage_path",
        ) from error
