"""Prompts of a dataset as token ids, through the chat template if there is one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sametoken.bench.datasets import RANDOM, DatasetItem, load_dataset
from sametoken.errors import ConfigError
from sametoken.text.tokenizer import Tokenizer


def dataset_prompts(
    name: str, path: Path | None, tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], ...]:
    """Encode the first turns of a dataset; none for ``random`` (``RequestSource`` draws those).

    Raises:
        ConfigError: as ``load_dataset``, or there is no tokenizer.
    """
    if name == RANDOM and path is None:
        return ()
    items = load_dataset(name, path=path)
    if tokenizer is None:
        raise ConfigError(f"dataset {name!r} needs a tokenizer", "use --dataset random")
    return tuple(encode_items(items, tokenizer))


def encode_items(items: Iterable[DatasetItem], tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
    """Encode first turns, through the chat template if there is one."""
    for item in items:
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(item.messages, add_generation_prompt=True)
            yield tokenizer.encode(text, add_special_tokens=False)
        else:
            yield tokenizer.encode(item.turns[0])
