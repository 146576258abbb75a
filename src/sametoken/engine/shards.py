"""Hidden states on disk: safetensors shards, and a manifest that says what they hold.

A directory holds ``manifest.json`` and shards of R rows each: ``hidden_states``
[R, num_layers, hidden] in the model's dtype, ``token_ids`` [R] and ``next_token_ids`` [R]
int64. Row by row they are a position's states, its token, and the token after it. The
manifest names the ranges of positions that lie one after the other in each shard. Names
and the meaning of layer ids are vLLM's ``extract_hidden_states`` method's: layer i is the
stream that enters layer i, ``num_hidden_layers`` the one that enters the final norm.

Every file is written under another name and then renamed, a shard before the manifest that
names it. What the manifest names is there, whatever happened.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sametoken.errors import CheckpointError, ConfigError

FORMAT = "sametoken-hidden-states-1"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class StateSource:
    """What states were taken from. States of different sources do not share a directory.

    Attributes:
        model: path of the checkpoint.
        eagle_aux_hidden_state_layer_ids: the layers, in the order of ``hidden_states``.
        dtype: of the states, as in "bfloat16".
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
        request_id: the engine's, which may come back in another run.
        prompt_digest: ``prompt_digest`` of the prompt.
        prompt_len: tokens of the prompt.
        num_rows: positions that are written.
        complete: the request ended by itself, and all its rows are written. What an abort,
            NaN, or the end of the process has cut short never becomes complete.
    """

    request_id: str
    prompt_digest: str
    prompt_len: int
    num_rows: int
    complete: bool


@dataclass(frozen=True, slots=True)
class RowRange:
    """Positions ``start .. stop - 1`` of the sequence of that index in the manifest."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A file, and the ranges that lie in it one after the other."""

    file: str
    ranges: tuple[RowRange, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a directory holds.

    Attributes:
        complete: no request was under way when this was written.
    """

    source: StateSource
    complete: bool = True
    sequences: tuple[SequenceEntry, ...] = ()
    shards: tuple[Shard, ...] = ()

    @property
    def finished_prompts(self) -> frozenset[str]:
        """Digests of the prompts whose sequences are complete: a later run may skip those."""
        return frozenset(one.prompt_digest for one in self.sequences if one.complete)


@dataclass(frozen=True, slots=True)
class ExtractedSequence:
    """One sequence as a trainer wants it.

    Attributes:
        token_ids: [n] int64, prompt and output.
        hidden_states: [n - 1, num_layers, hidden]; the last token was never run.
        prompt_len: leading tokens that are the prompt.
    """

    request_id: str
    token_ids: Tensor
    hidden_states: Tensor
    prompt_len: int


class ExtractedStates:
    """The complete sequences of a directory by index, in the order of the manifest.

    Raises:
        CheckpointError: the manifest is missing or malformed; on access, a shard is.
    """

    def __init__(self, directory: str | Path) -> None:
        self.manifest = read_manifest(Path(directory))
        self._directory = Path(directory)
        self._complete = [i for i, one in enumerate(self.manifest.sequences) if one.complete]
        # By sequence: files, and where its rows begin and end in each.
        self._places: dict[int, list[tuple[str, int, int]]] = {}
        for shard in self.manifest.shards:
            first = 0
            for part in shard.ranges:
                last = first + part.stop - part.start
                self._places.setdefault(part.sequence, []).append((shard.file, first, last))
                first = last

    def __len__(self) -> int:
        return len(self._complete)

    def __getitem__(self, index: int) -> ExtractedSequence:
        sequence = self._complete[index]
        entry = self.manifest.sequences[sequence]
        parts = [self._read(*place) for place in self._places[sequence]]
        states, tokens, following = (torch.cat(part) for part in zip(*parts, strict=True))
        token_ids = torch.cat((tokens, following[-1:]))
        return ExtractedSequence(entry.request_id, token_ids, states, entry.prompt_len)

    def _read(self, name: str, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        path = self._directory / name
        try:
            with safe_open(path, framework="pt") as file:
                states, tokens, following = (
                    file.get_slice(name)[first:last]
                    for name in ("hidden_states", "token_ids", "next_token_ids")
                )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} is missing, truncated or corrupt ({error})", "extract the states again"
            ) from error
        return states, tokens, following


def prompt_digest(token_ids: Sequence[int]) -> str:
    """A short name of a prompt, the same on every machine."""
    text = " ".join(map(str, token_ids))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a directory.

    Raises:
        CheckpointError: it is missing, malformed, or of another format.
    """
    path = directory / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} holds no {MANIFEST}", "give a directory of extracted hidden states"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})", "extract again") from error
    try:
        if found["format"] != FORMAT:
            raise CheckpointError(
                f"{path} is of format {found['format']!r}", f"extract again, in {FORMAT!r}"
            )
        return _manifest(found)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is malformed ({error!r})", "extract again") from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Put a manifest in place of the last one.

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
    _replace(directory / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def write_shard(directory: Path, shard: Shard, tensors: dict[str, Tensor]) -> None:
    """Write a shard's file; it counts from the next manifest on, which must name it.

    Raises:
        ConfigError: the directory cannot be written.
    """
    ranges = json.dumps([asdict(one) for one in shard.ranges])
    _replace(
        directory / shard.file,
        lambda path: save_file(tensors, path, metadata={"format": "pt", "ranges": ranges}),
    )


def _manifest(found: dict[str, Any]) -> Manifest:
    source = {one.name: found[one.name] for one in fields(StateSource)}
    layers = tuple(source.pop("eagle_aux_hidden_state_layer_ids"))
    return Manifest(
        source=StateSource(**source, eagle_aux_hidden_state_layer_ids=layers),
        complete=found["complete"],
        sequences=tuple(SequenceEntry(**one) for one in found["sequences"]),
        shards=tuple(
            Shard(one["file"], tuple(RowRange(**part) for part in one["ranges"]))
            for one in found["shards"]
        ),
    )


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        write(unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} cannot be written ({error})",
            "make room there, or set another shared_storage_path",
        ) from error
