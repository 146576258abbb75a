"""Prompts of a dataset as token ids, through the chat template if there is one."""

from __future__ import annotations

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
    templated = bool(tokenizer.chat_template)
    return tuple(first_turn(item, tokenizer, templated=templated)[1] for item in items)


def first_turn(
    item: DatasetItem, tokenizer: Tokenizer, *, templated: bool
) -> tuple[str, tuple[int, ...]]:
    """An item's prompt as text and as token ids, through the chat template if wanted."""
    if not templated:
        return item.turns[0], tokenizer.encode(item.turns[0])
    text = tokenizer.apply_chat_template(item.messages, add_generation_prompt=True)
    return text, tokenizer.encode(text, add_special_tokens=False)
