"""The verdict on a trainer's log-probabilities: JSON values, and text for a terminal."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sametoken.audit.trainer_fit import (
    BOTH,
    EQUAL,
    SIZES,
    STALE,
    TEMPERATURE,
    TIES,
    TOKENS,
    UNEXPLAINED,
    Fit,
)
from sametoken.bench.documents import render_page

#: The most serious first.
_CAUSES = (UNEXPLAINED, TOKENS, BOTH, STALE, TEMPERATURE, TIES, EQUAL)
_REMEDIES = {
    TOKENS: "give the trainer the token ids of the rollout, not its text",
    STALE: "give engine and trainer the same weights before the next rollout",
    TEMPERATURE: "divide the trainer's logits by the rollout's temperature, and state it",
    BOTH: "give engine and trainer the same weights, and divide the trainer's logits by the "
    "rollout's temperature",
    TIES: "the trainer's kernels round otherwise",
    UNEXPLAINED: "compare the masks, the positions and the order of the trainer's tokens",
}
_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """One token of an answer.

    Attributes:
        rollout: the rollout's name.
        position: index in the answer.
        token_id, text: the token; the text is None without a tokenizer.
        trainer, engine: the two log-probabilities.
    """

    rollout: str
    position: int
    token_id: int
    text: str | None
    trainer: float
    engine: float


@dataclass(frozen=True, slots=True)
class WrongToken:
    """Where a prompt leaves what the chat template gives.

    Attributes:
        rollout: the rollout's name.
        position: index of the first different token.
        expected, found: the texts there; None past the end.
        how: "lacks" a token, "has one more", or has "another one".
    """

    rollout: str
    position: int
    expected: str | None
    found: str | None
    how: str

    @classmethod
    def of(
        cls,
        rollout: str,
        expected: tuple[int, ...],
        found: tuple[int, ...],
        text_of: Callable[[int], str],
    ) -> WrongToken:
        """Describe the first difference of two prompts that are not equal."""
        pairs = zip(expected, found, strict=False)
        shorter = min(len(expected), len(found))
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
        how = "another one"
        if expected[place + 1 :] == found[place:]:
            how = "lacks"
        elif expected[place:] == found[place + 1 :]:
            how = "has one more"
        wanted, given = (
            text_of(ids[place]) if place < len(ids) else None for ids in (expected, found)
        )
        return cls(rollout, place, wanted, given, how)


@dataclass(frozen=True, slots=True)
class RolloutFinding:
    """One rollout.

    Attributes:
        rollout: its name.
        cause: why it differs: by what explains its group, or by what explains it alone if nothing
            explains the group.
        given: its differences under what it says of itself.
        first: the first token whose bits differ; None without any.
    """

    rollout: str
    cause: str
    given: Fit
    first: TokenDifference | None


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts that say the same of themselves.

    Attributes:
        weight_version, temperature: what they say.
        num_rollouts: how many they are.
        cause: why they differ.
        best: the assumption that fits best; ``given`` if no other explains more.
        given: under what they say of themselves.
        others: under other assumptions.
        largest: the tokens that differ most.
        rollouts: the finding on each.
    """

    weight_version: int | None
    temperature: float
    num_rollouts: int
    cause: str
    best: Fit
    given: Fit
    others: tuple[Fit, ...]
    largest: tuple[TokenDifference, ...]
    rollouts: tuple[RolloutFinding, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainerVerdict:
    """The result of an audit of a trainer.

    Attributes:
        model: the weights that the rollouts are said to come from.
        groups: by weight version and temperature.
        wrong_tokens: prompts that are not what the chat template gives.
        num_cut: tokens beyond the engine's ``max_model_len``, which were not compared.
        environment: as in the documents of ``bench``.
    """

    model: str
    groups: tuple[Group, ...]
    wrong_tokens: tuple[WrongToken, ...] = ()
    num_cut: int = 0
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether every token and every log-probability is the same, to the bit."""
        return self.summary == EQUAL

    @property
    def summary(self) -> str:
        """The most serious cause; prompts with wrong tokens explain what else is unexplained."""
        causes = {group.cause for group in self.groups}
        if self.wrong_tokens:
            causes = causes - {UNEXPLAINED} | {TOKENS}
        return next(cause for cause in _CAUSES if cause in causes)

    def as_json(self) -> dict[str, Any]:
        """Convert to JSON values: every field, ``summary``, ``identical``, remedy and sizes."""
        return {
            "summary": self.summary,
            "identical": self.identical,
            "remedy": _REMEDIES.get(self.summary),
            "sizes": SIZES,
            **dataclasses.asdict(self),
        }

    def lines(self) -> Iterator[str]:
        """Yield the verdict as lines of text."""
        yield f"the trainer against {self.model}: {self.summary}"
        for one in self.wrong_tokens[:_MAX_SHOWN]:
            yield f"  rollout {one.rollout}, token {one.position} of the prompt: {_told(one)}"
        if len(self.wrong_tokens) > _MAX_SHOWN:
            yield f"  and {len(self.wrong_tokens) - _MAX_SHOWN} more prompts"
        for group in self.groups:
            yield from _of_group(group)
        if self.num_cut:
            yield f"  {self.num_cut} tokens beyond max_model_len were not compared"
        if self.summary in _REMEDIES:
            yield f"  {_REMEDIES[self.summary]}"

    def html(self) -> str:
        """Render the verdict as one self-contained HTML page."""
        folder = resources.files("sametoken.audit").joinpath("page")
        return render_page(folder, "trainer", f"{self.model}: trainer", self.as_json())


def _told(one: WrongToken) -> str:
    if one.how == "lacks":
        return f"{one.expected!r} is missing"
    if one.how == "has one more":
        return f"{one.found!r} is one too many"
    texts = ("the end" if text is None else repr(text) for text in (one.found, one.expected))
    return " in place of ".join(texts)


def _of_group(group: Group) -> Iterator[str]:
    version = "" if group.weight_version is None else f"weight version {group.weight_version}, "
    said = f"{version}temperature {group.temperature:g}"
    yield f"  {group.num_rollouts} rollouts, {said}: {group.cause}"
    causes = Counter(one.cause for one in group.rollouts)
    if len(causes) > 1:
        yield f"    by rollout: {', '.join(f'{count} {cause}' for cause, count in causes.items())}"
    for fit in (group.given, *group.others):
        mark = " (best)" if fit is group.best and group.best is not group.given else ""
        yield f"    {fit.assumed}{mark}: {_counts(fit)}"
    for one in group.largest if group.cause != EQUAL else ():
        text = one.token_id if one.text is None else repr(one.text)
        yield (
            f"    rollout {one.rollout}, token {one.position} of the answer ({text}): "
            f"{one.trainer:.6g}, the engine {one.engine:.6g}"
        )


def _counts(fit: Fit) -> str:
    if fit.is_exact:
        return f"all {fit.num_tokens} log-probabilities equal"
    return (
        f"{fit.num_equal} of {fit.num_tokens} equal, difference {fit.mean_abs:.3g} in the mean and "
        f"{fit.max_abs:.3g} at most, mean of trainer less engine {fit.mean:.3g}"
    )
