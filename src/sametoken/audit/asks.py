"""The requests of an audit, made from a dataset, and their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sametoken.bench.datasets import DatasetItem
from sametoken.bench.measure import Window
from sametoken.bench.prompts import first_turn
from sametoken.errors import ConfigError
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.sampling_params import derive_seed


def make_requests(
    items: Sequence[DatasetItem],
    tokenizer: Tokenizer | None,
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    templated: bool,
    adapter: str | None = None,
) -> list[AuditRequest]:
    """Make one request per item and temperature; items have different seeds.

    Args:
        items: their first turns are the prompts.
        tokenizer: the model's; None leaves prompts as texts for servers.
        temperatures: 0 is greedy.
        max_tokens: maximum answer length.
        templated: apply the chat template; needs a tokenizer.
        adapter: see ``AuditRequest``.

    Raises:
        ConfigError: two requests have one name.
        RequestError: the chat template is missing or fails on an item.
    """
    requests = []
    for index, item in enumerate(items):
        text, ids = item.turns[0], tuple[int, ...]()
        if tokenizer is not None:
            text, ids = first_turn(item, tokenizer, templated=templated)
        for temperature in temperatures:
            name = f"{item.item_id}@{temperature:g}"
            seed = derive_seed(0, index)
            requests.append(AuditRequest(name, ids, text, temperature, seed, max_tokens, adapter))
    names = Counter(request.name for request in requests)
    for name, count in names.items():
        if count > 1:
            raise ConfigError(
                f"{count} requests of the audit are named {name!r}, by prompt and temperature",
                "give each prompt an id of its own, and each temperature once",
            )
    return requests


NUM_CANDIDATES = 2
#: The two most likely tokens of a position with their log-probabilities, best first.
TopTwo = tuple[tuple[int | str, float], ...]


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """One request of an audit.

    Attributes:
        name: unique in the audit.
        prompt_token_ids: the prompt; empty if no tokenizer is known.
        text: the prompt, for servers without ids.
        temperature, seed, max_tokens: sampling parameters.
        adapter: as ``lora_name`` in ``EngineRequest``; a server's is named by its served model.
    """

    name: str
    prompt_token_ids: tuple[int, ...]
    text: str
    temperature: float
    seed: int
    max_tokens: int
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    Attributes:
        tokens: token ids, or the token texts of a server that returns no ids.
        windows: the verify steps in order; empty if unknown.
        top: the two best candidates of every position; empty if not requested.
        texts: a server's token texts; empty for an engine.
        failed: logits were NaN after ``tokens``.
    """

    tokens: tuple[int | str, ...]
    windows: tuple[Window, ...] = ()
    top: tuple[TopTwo, ...] = ()
    texts: tuple[str, ...] = ()
    failed: bool = False

    def window_at(self, position: int) -> Window | None:
        """Return the verify step that emitted the token at ``position``, if known."""
        return next((w for w in self.windows if w.first <= position < w.end), None)


#: The answers of one run, by request name.
Answers = dict[str, Answer]


def num_tokens_of(answers: Answers) -> int:
    """Count the tokens of a run."""
    return sum(len(answer.tokens) for answer in answers.values())
