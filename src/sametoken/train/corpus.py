"""Documents for training a language model: streams of tokens, each with its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sametoken.errors import ConfigError, in_words
from sametoken.io.json_text import json_lines
from sametoken.train.compute import generator_of
from sametoken.train.text import conversation_in, digest_of, text_in

# Documents that are encoded together.
_ENCODED_AT_ONCE = 1024
# Shares up to this can be added and multiplied as floats.
_MAX_SHARE = 1e100


@dataclass(frozen=True, slots=True)
class Source:
    """A file of documents.

    Attributes:
        path: JSON lines (``.jsonl``, or packed ``.jsonl.gz``): a text, ``{"text"}``,
            ``{"prompt", "answer"}`` or ``{"messages"}``; any other file is one document.
        share: weight of the source when windows are drawn.
    """

    path: Path
    share: float

    @classmethod
    def parse(cls, value: str) -> Source:
        """``PATH`` or ``PATH=SHARE``.

        Raises:
            ConfigError: the share is not a number above 0 and up to 1e100.
        """
        path, equals, share = value.rpartition("=")
        if not equals:
            return cls(Path(value), 1.0)
        try:
            number = float(share)
        except ValueError:
            number = 0.0
        if not 0 < number <= _MAX_SHARE:
            raise ConfigError(
                f"{value!r} has no share above 0 and up to {_MAX_SHARE:g}", "give PATH or PATH=0.5"
            )
        return cls(Path(path), number)

    def documents(self) -> list[str]:
        """Its texts, conversations through the chat template.

        Raises:
            ConfigError: the file is missing, malformed or empty.
        """
        if not self.path.name.endswith((".jsonl", ".jsonl.gz")):
            try:
                found = [self.path.read_text(encoding="utf-8")]
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{self.path} cannot be read ({in_words(error)})", "give text"
                ) from error
        else:
            found = list(self._rows())
        if not any(found):
            raise ConfigError(f"{self.path} holds no documents", "give one a line, or a text")
        return found

    def _rows(self) -> Iterator[str]:
        for number, row in json_lines(self.path):
            try:
                yield _text_of(row)
            except ValueError as error:
                raise ConfigError(
                    f"line {number} of {self.path} is no document ({error})",
                    'give a text, {"text"}, {"prompt", "answer"} or {"messages"}',
                ) from error


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token streams and their shares.

    Attributes:
        streams: [N_i] int32 each, documents with an end-of-text token after each.
        shares: [S] float64, adding up to 1.
        num_tokens: of the documents, of which a short stream has repetitions.
    """

    streams: tuple[Tensor, ...]
    shares: Tensor
    num_tokens: int

    def windows(self, seed: int, step: int, count: int, length: int) -> Tensor:
        """[count, length] int64: a step's windows, which follow from seed and step alone."""
        generator = generator_of(seed, "windows", step)
        chosen = torch.multinomial(self.shares, count, replacement=True, generator=generator)
        places = torch.rand(count, generator=generator, dtype=torch.float64)
        rows = []
        for source, place in zip(chosen.tolist(), places.tolist(), strict=True):
            stream = self.streams[source]
            first = int(place * (stream.shape[0] - length + 1))
            rows.append(stream[first : first + length])
        return torch.stack(rows).to(torch.int64)

    @property
    def digest(self) -> str:
        """A hash of the tokens, the same on every machine."""
        return digest_of(*self.streams)


def encode_corpus(
    sources: list[Source],
    encode: Callable[[list[str]], list[list[int]]],
    *,
    end: int,
    length: int,
    announce: Callable[[str], None],
) -> Corpus:
    """Encode all documents.

    Args:
        sources: where they are.
        encode: texts to token ids.
        end: the token after every document.
        length: of the windows; a shorter stream is repeated until it holds one.
        announce: receives a line about each source.

    Raises:
        ConfigError: a source is missing, malformed or empty.
    """
    streams, num_tokens = [], 0
    for source in sources:
        parts = []
        for texts in _grouped(source.documents()):
            for ids in encode(texts):
                parts.append(np.asarray([*ids, end], dtype=np.int32))
        stream = torch.from_numpy(np.concatenate(parts))
        announce(f"{source.path}: {stream.shape[0]} tokens, share {source.share:g}")
        num_tokens += stream.shape[0]
        repeats = -(-length // stream.shape[0])
        streams.append(stream.repeat(repeats) if repeats > 1 else stream)
    shares = torch.tensor([source.share for source in sources], dtype=torch.float64)
    return Corpus(tuple(streams), shares / shares.sum(), num_tokens)


def _grouped(texts: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(texts), _ENCODED_AT_ONCE):
        yield texts[first : first + _ENCODED_AT_ONCE]


def _text_of(row: Any) -> str:
    if isinstance(row, str):
        return row
    if isinstance(row, dict) and "text" in row:
        return text_in(row, "text")
    turns = [(text_in(m, "role"), text_in(m, "content")) for m in conversation_in(row)]
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
