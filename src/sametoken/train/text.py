"""Text to train on: token sequences, each with the length of its prompt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import ConfigError
from sametoken.io.json_text import json_lines

#: Turns a conversation's messages, or a plain text, into token ids.
Encode = Callable[[Any], Sequence[int]]
_REMEDY = (
    'give one JSON value a line: {"prompt_token_ids": [..], "output_token_ids": [..]}, '
    '{"prompt": text, "answer": text}, or {"messages": [..]} that end with the answer'
)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token sequences one after the other.

    Attributes:
        token_ids: [N] int64, all tokens.
        starts: [S + 1] int64; sequence i is ``token_ids[starts[i] : starts[i + 1]]``.
        prompt_lens: [S] int64; leading tokens, which are the prompt and not trained on.
    """

    token_ids: Tensor
    starts: Tensor
    prompt_lens: Tensor

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int], int]]) -> Sequences:
        """From token ids and prompt lengths."""
        flat: list[int] = []
        starts, prompt_lens = [0], []
        for token_ids, prompt_len in pairs:
            flat.extend(token_ids)
            starts.append(len(flat))
            prompt_lens.append(prompt_len)
        return cls(*(torch.tensor(part, dtype=torch.int64) for part in (flat, starts, prompt_lens)))

    def __len__(self) -> int:
        return self.prompt_lens.shape[0]

    @property
    def lengths(self) -> Tensor:
        """[S] int64."""
        return self.starts.diff()

    def sequence(self, index: int) -> Tensor:
        """[n] int64, the tokens of one sequence."""
        return self.token_ids[self.starts[index] : self.starts[index + 1]]

    def answer_counts(self, vocab_size: int, indices: list[int]) -> Tensor:
        """[V] int64: how often each token occurs in the answers of the given sequences."""
        chosen = torch.zeros(len(self), dtype=torch.bool)
        chosen[indices] = True
        places = torch.arange(self.token_ids.shape[0])
        owners = torch.bucketize(places, self.starts[1:], right=True)
        counted = chosen[owners] & (places - self.starts[owners] >= self.prompt_lens[owners])
        return torch.bincount(self.token_ids[counted], minlength=vocab_size)

    @property
    def digest(self) -> str:
        """A hash of the tokens, the same on every machine."""
        return digest_of(self.token_ids, self.starts)

    def split(self, share: float) -> tuple[list[int], list[int]]:
        """Indices to train on and to measure with; answers to one prompt stay together.

        The choice of prompts follows from their tokens alone. Both lists hold at least one
        sequence if ``share`` is above 0 and there are two different prompts.
        """
        places = [self._prompt_place(i) for i in range(len(self))]
        lowest, highest = min(places), max(places)
        # At least the prompt of the lowest place, and never that of the highest.
        bound = min(max(share, math.nextafter(lowest, 1)), highest) if share > 0 else 0
        kept = [i for i, place in enumerate(places) if place >= bound]
        return kept, [i for i, place in enumerate(places) if place < bound]

    def _prompt_place(self, index: int) -> float:
        """A number in [0, 1) from the hash of a prompt."""
        prompt = self.sequence(index)[: int(self.prompt_lens[index])]
        digest = hashlib.blake2b(prompt.numpy().tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64


def digest_of(*parts: Tensor) -> str:
    """A hash of integers, one tensor after the other."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part.numpy().tobytes())
    return found.hexdigest()


def require_text(path: Path) -> None:
    """Refuse a file with a line that is no training text, before anything is loaded for it.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    for number, row in json_lines(path):
        with _placed(path, number):
            _parts_of(row)


@contextmanager
def _placed(path: Path, number: int) -> Iterator[None]:
    """Name the line that holds no text."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"line {number} of {path} is no text ({error})", _REMEDY) from error


def read_sequences(
    path: Path, *, vocab_size: int, max_length: int, encode: Encode | None = None
) -> Sequences:
    """Read training text, JSON lines, packed with gzip if the name ends in .gz.

    Args:
        path: a line is ``{"prompt_token_ids", "output_token_ids"}``, or with ``encode``
            ``{"prompt", "answer"}`` or ``{"messages"}`` that end with the answer.
        vocab_size: ids must be below it.
        max_length: longer sequences are cut; those that ``is_trainable`` is false of are dropped.
        encode: messages to token ids; a conversation's ids must begin with its prompt's.

    Raises:
        ConfigError: the file is missing or malformed, an id is outside the vocabulary, or
            nothing is left to train on.
    """
    pairs: list[tuple[Sequence[int], int]] = []
    for number, row in json_lines(path):
        with _placed(path, number):
            token_ids, prompt_len = _tokens_of(row, encode)
        if not all(0 <= i < vocab_size for i in token_ids):
            raise ConfigError(
                f"line {number} of {path} holds token ids outside 0..{vocab_size - 1}",
                "use text that the target's own tokenizer made",
            )
        if is_trainable(prompt_len, min(len(token_ids), max_length)):
            pairs.append((token_ids[:max_length], prompt_len))
    if not pairs:
        raise ConfigError(
            f"{path} holds no answer of two tokens within max_length, or of three to an empty "
            "prompt",
            f"raise max_length, or {_REMEDY}",
        )
    return Sequences.of(pairs)


def is_trainable(prompt_len: int, num_tokens: int) -> bool:
    """Whether a sequence has a row to draft from: see ``sametoken.train.batches.DraftRows``.

    The first is the prompt's last, or of an empty prompt the answer's first; two tokens follow it.
    """
    return max(prompt_len, 1) + 2 <= num_tokens


def messages_in(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row's ``messages``.

    Raises:
        ValueError: it is not a list of objects with role and content as text.
    """
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is no list of messages")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError("a message is no object")
        # A tool call takes the place of content.
        wanted = ("role",) if message.get("tool_calls") else ("role", "content")
        for name in wanted:
            text_in(message, name)
    return messages


def conversation_in(row: Any) -> list[dict[str, Any]]:
    """The conversation of a row: its ``messages``, or its ``prompt`` and ``answer``.

    Raises:
        ValueError: the row is not an object, lacks both, or holds other values than text; or the
            last message is not the assistant's.
    """
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    if "messages" not in row:
        return [
            {"role": "user", "content": text_in(row, "prompt")},
            {"role": "assistant", "content": text_in(row, "answer")},
        ]
    messages = messages_in(row)
    if messages[-1]["role"] != "assistant":
        raise ValueError("the last message is not the assistant's")
    return messages


def text_in(row: dict[str, Any], name: str) -> str:
    """The text of a row under a name.

    Raises:
        ValueError: the row has no text under it.
    """
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value


def token_ids_in(row: dict[str, Any], name: str) -> list[int]:
    """The list of integers of a row under a name.

    Raises:
        ValueError: the row has no list of integers under it.
    """
    value = row.get(name)
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise ValueError(f"{name} is no list of integers")
    return value


def _parts_of(row: Any) -> tuple[list[int], list[int]] | list[dict[str, Any]]:
    """The token ids of a row's prompt and answer, or its conversation.

    Raises:
        ValueError: the row has neither.
    """
    if isinstance(row, dict) and "prompt_token_ids" in row:
        return token_ids_in(row, "prompt_token_ids"), token_ids_in(row, "output_token_ids")
    return conversation_in(row)


def _tokens_of(row: Any, encode: Encode | None) -> tuple[list[int], int]:
    parts = _parts_of(row)
    if isinstance(parts, tuple):
        prompt, answer = parts
        return prompt + answer, len(prompt)
    if encode is None:
        raise ValueError("it has no prompt_token_ids, and there is no tokenizer")
    whole, prompt = list(encode(parts)), list(encode(parts[:-1]))
    if whole[: len(prompt)] != prompt:
        raise ValueError("the conversation does not begin with its prompt")
    return whole, len(prompt)
