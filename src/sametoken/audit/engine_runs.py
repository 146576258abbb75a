"""Answer the asks of an audit with this engine, noting every verify step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sametoken.audit.asks import (
    Answer,
    Answers,
    Ask,
    TopTwo,
)
from sametoken.bench.measure import Window
from sametoken.engine.core import EngineCore
from sametoken.types.outputs import PositionLogprobs
from sametoken.types.request import (
    EngineRequest,
    RequestUpdate,
)
from sametoken.types.sampling_params import SamplingParams

NUM_CANDIDATES = 2


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How the asks are run.

    Attributes:
        concurrency: requests at once, at most.
        max_drafts: drafts per step at most; None leaves it to the engine.
        shuffled: the requests arrive in another order.
        top: keep the two best candidates of every position.
    """

    concurrency: int
    max_drafts: int | None = None
    shuffled: bool = False
    top: bool = False


@dataclass(slots=True)
class _Running:
    ask: Ask
    tokens: list[int] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    top: list[TopTwo] = field(default_factory=list)
    failed: bool = False

    def take(self, update: RequestUpdate) -> None:
        """Note what a step brought."""
        self.failed = update.failed
        if not update.samples or update.failed:
            return
        self.windows.append(Window(len(self.tokens), update.num_drafts, update.num_accepted))
        self.tokens.extend(update.token_ids)
        self.top.extend(map(_two_best, update.logprobs or ()))

    def finished(self, eos: frozenset[int]) -> Answer | None:
        """The answer, if it has ended."""
        length = next((i + 1 for i, t in enumerate(self.tokens) if t in eos), None)
        stopped = length is not None and length <= self.ask.max_tokens
        if not (stopped or self.failed or len(self.tokens) >= self.ask.max_tokens):
            return None
        end = length if length is not None and stopped else self.ask.max_tokens
        reason = "error" if self.failed else "stop" if stopped else "length"
        return Answer(tuple(self.tokens[:end]), tuple(self.windows), tuple(self.top[:end]), reason)


def _two_best(position: PositionLogprobs) -> TopTwo:
    ranked = sorted(position.items(), key=lambda pair: pair[1].rank)
    return tuple((token, found.logprob) for token, found in ranked[:NUM_CANDIDATES])


def run_asks(
    core: EngineCore, asks: Sequence[Ask], settings: RunSettings, eos: frozenset[int]
) -> Answers:
    """Answer all asks; the prefix cache is left out, so that nothing is served from before.

    Args:
        core: idle before and after.
        asks: with names of their own.
        settings: how they are run.
        eos: tokens that end an answer.

    Raises:
        RequestError: an ask is longer than the engine allows.
        EngineDeadError: the engine failed.
    """
    order = random.Random(1).sample(list(asks), len(asks)) if settings.shuffled else list(asks)
    waiting = deque(order)
    running: dict[str, _Running] = {}
    answers: Answers = {}
    while waiting or running:
        while waiting and len(running) < settings.concurrency:
            ask = waiting.popleft()
            core.add_request(request_of(ask, settings))
            running[ask.name] = _Running(ask)
        for update in core.step():
            one = running[update.request_id]
            one.take(update)
            answer = one.finished(eos)
            if answer is not None:
                answers[update.request_id] = answer
                del running[update.request_id]
                core.release(update.request_id)
    while core.has_unfinished:
        core.step()
    return {ask.name: answers[ask.name] for ask in asks}


def request_of(ask: Ask, settings: RunSettings) -> EngineRequest:
    """The engine's request for an ask."""
    params = SamplingParams(
        temperature=ask.temperature,
        seed=ask.seed,
        max_tokens=ask.max_tokens,
        logprobs=NUM_CANDIDATES if settings.top else None,
    )
    return EngineRequest(
        ask.name,
        ask.prompt_token_ids,
        params,
        len(ask.prompt_token_ids) + ask.max_tokens,
        num_speculative_tokens=settings.max_drafts,
        use_prefix_cache=False,
    )
