"""The reduced vocabulary of a draft head, and ``sametoken train token-map``, which counts it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sametoken.io.files import write_text
from sametoken.models.loader import read_config
from sametoken.train.options import TokenMapOptions
from sametoken.train.text import Encode, read_sequences


@dataclass(frozen=True, slots=True)
class TokenMapResult:
    """Figures of a map.

    Attributes:
        tokens: of the map.
        vocab_size: of the target.
        counted: answer tokens that the map was counted from.
        coverage: share of the held-back answers' tokens that the map holds; without held-back
            answers, of the counted ones.
        held_back: held-back answers.
    """

    tokens: int
    vocab_size: int
    counted: int
    coverage: float
    held_back: int


def write_token_map(
    model: Path, output: Path, text: Path, encode: Encode | None, options: TokenMapOptions
) -> TokenMapResult:
    """Count the tokens of answers and write the most frequent ones, a JSON list of ids.

    Tokens that end an answer are always among them.

    Args:
        model: the target, a checkpoint directory or a GGUF file.
        output: the file.
        text: answers, as ``read_sequences`` reads them.
        encode: see ``read_sequences``.
        options: how many tokens, and the share that is held back.

    Raises:
        ConfigError: the text or the output is not possible.
        CheckpointError: the target's config cannot be read.
    """
    config = read_config(model)
    sequences = read_sequences(
        text, vocab_size=config.vocab_size, max_length=sys.maxsize, encode=encode
    )
    kept, held = sequences.split(options.validation)
    counts = sequences.answer_counts(config.vocab_size, kept)
    wanted = counts.clone()
    wanted[list(config.eos_token_ids)] = sys.maxsize
    token_ids = frequent_tokens(wanted, options.size)
    write_text(output, json.dumps(token_ids.tolist()) + "\n")
    verified = sequences.answer_counts(config.vocab_size, held) if held else counts
    return TokenMapResult(
        tokens=token_ids.shape[0],
        vocab_size=config.vocab_size,
        counted=int(counts.sum()),
        coverage=coverage(verified, token_ids),
        held_back=len(held),
    )


def frequent_tokens(counts: Tensor, size: int) -> Tensor:
    """The most frequent tokens, ascending.

    Args:
        counts: [V] int64, how often each token occurs.
        size: how many to take, at most V. Among equal counts the lowest ids are taken.

    Returns:
        [min(size, V)] int64.
    """
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


def offsets_of(token_ids: Tensor) -> Tensor:
    """``d2t``: [D] int64, the difference between the target's id and the draft id."""
    return token_ids - torch.arange(token_ids.shape[0])


def membership(token_ids: Tensor, vocab_size: int) -> Tensor:
    """``t2d``: [V] bool, whether the head can propose a token."""
    inside = torch.zeros(vocab_size, dtype=torch.bool)
    inside[token_ids] = True
    return inside


def coverage(counts: Tensor, token_ids: Tensor) -> float:
    """Share of the counted tokens that the head can propose."""
    return int(counts[token_ids].sum()) / max(int(counts.sum()), 1)
