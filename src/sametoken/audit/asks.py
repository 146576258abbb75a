"""From a dataset to the asks of an audit."""

from __future__ import annotations

from collections.abc import Sequence

from sametoken.audit.answers import Ask
from sametoken.bench.datasets import DatasetItem
from sametoken.core.seeds import derive_seed
from sametoken.engine.tokenizer import Tokenizer


def make_asks(
    items: Sequence[DatasetItem],
    tokenizer: Tokenizer | None,
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    templated: bool,
    seed: int = 0,
) -> list[Ask]:
    """Every item at every temperature, each with a seed of its own.

    Args:
        items: whose first turns are asked.
        tokenizer: the model's; None leaves prompts as texts for a server.
        temperatures: 0 is greedy.
        max_tokens: longest answer.
        templated: put the chat template around prompts; needs a tokenizer.
        seed: of the audit.

    Raises:
        RequestError: the chat template is missing or refuses an item.
    """
    asks = []
    for index, item in enumerate(items):
        text, ids = _prompt(item, tokenizer, templated)
        for temperature in temperatures:
            name = f"{item.item_id}@{temperature:g}"
            own = derive_seed(seed, index)
            asks.append(Ask(name, ids, text, temperature, own, max_tokens))
    return asks


def _prompt(
    item: DatasetItem, tokenizer: Tokenizer | None, templated: bool
) -> tuple[str, tuple[int, ...]]:
    if tokenizer is None:
        return item.turns[0], ()
    if not templated:
        return item.turns[0], tokenizer.encode(item.turns[0])
    text = tokenizer.apply_chat_template(item.messages, add_generation_prompt=True)
    return text, tokenizer.encode(text, add_special_tokens=False)
