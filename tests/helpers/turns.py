"""Conversations through LLM, with an engine that caches prefixes and one that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from helpers.recorded import RecordedLogits
from helpers.static_steps import in_steps
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.llm import LLM
from sametoken.runner.runner import EagerLauncher
from sametoken.types.outputs import RequestOutput
from sametoken.types.sampling_params import SamplingParams


class RecordedEngine(NamedTuple):
    """An engine under an LLM, which cuts outputs at stops.

    Attributes:
        recorded: the logits of emitted tokens; None under graphs.
    """

    llm: LLM
    recorded: RecordedLogits | None


def start(target, steps: str | None = None, **options) -> RecordedEngine:
    """An engine, its steps in one of ``STEPS`` if that is named."""
    core = build_engine(EngineConfig.from_options(model=str(target), **options))
    if steps is not None:
        core._runner = in_steps(core._runner, steps)
    recorded = None
    if isinstance(core._runner.launcher, EagerLauncher):
        recorded = RecordedLogits()
        core._runner = recorded.runner(core._runner)
    return RecordedEngine(LLM.from_engine(core, None), recorded)


@dataclasses.dataclass(frozen=True)
class Talk:
    """What the user says, at the beginning and after each answer, and how it is answered.

    Attributes:
        stop_after: tokens of an answer before it may stop at one that is new in it.
        kept_every: positions between those of an answer where a request can start; the block
            size by default.
    """

    opening: tuple[int, ...]
    replies: tuple[tuple[int, ...], ...]
    max_tokens: int
    block_size: int
    temperature: float = 0.0
    stop_after: int = 4
    kept_every: int | None = None

    def ask(self, llm: LLM, prompt, stop: tuple[int, ...] = (), logprobs=None) -> RequestOutput:
        params = SamplingParams(
            temperature=self.temperature,
            seed=3,
            max_tokens=self.max_tokens,
            stop_token_ids=stop,
            logprobs=logprobs,
        )
        (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params)
        return output

    def stop_inside(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """A token at which to stop this answer, if it holds one."""
        late = range(self.stop_after, len(token_ids))
        return next(((token_ids[i],) for i in late if token_ids[i] not in token_ids[:i]), ())


class Turn(NamedTuple):
    """A turn's answer from KV of former turns, and from an engine without prefix cache."""

    hot: RequestOutput
    cold: RequestOutput


def check_turns(
    talk: Talk,
    hot: RecordedEngine,
    cold: Callable[[], RecordedEngine],
    plain: Callable[[], RecordedEngine],
) -> list[Turn]:
    """Hold a conversation with an engine that may use what earlier turns left.

    Args:
        talk: the conversation.
        hot: the engine under test, with a prefix cache.
        cold: one like it that has no prefix cache.
        plain: one without a prefix cache and without drafts, which says what is right.
    """
    prompt, num_kept, num_former, turns = talk.opening, 0, 0, []
    for reply in (*talk.replies, ()):
        truth = plain()
        stop = talk.stop_inside(talk.ask(truth.llm, prompt).outputs[0].token_ids)
        expected = talk.ask(truth.llm, prompt, stop).outputs[0].token_ids
        turn = Turn(talk.ask(hot.llm, prompt, stop), talk.ask(cold().llm, prompt, stop))
        answer = turn.hot.outputs[0].token_ids
        assert answer == turn.cold.outputs[0].token_ids == expected
        if hot.recorded is not None:
            _check_logits(hot, truth, prompt, len(answer))

        cached = turn.hot.metrics.num_cached_tokens
        # All blocks whose KV must be there: the last kept token has none, unless it was
        # followed by others that were cut.
        every = talk.kept_every or talk.block_size
        assert cached // every >= max(0, num_kept - 1) // every
        assert cached <= num_kept
        assert cached > num_former or not num_former

        turns.append(turn)
        num_former, num_kept = len(prompt), len(prompt) + len(answer)
        prompt = (*prompt, *answer, *reply)
    hot.llm._engine.scheduler.check_integrity()
    return turns


def _check_logits(engine: RecordedEngine, plain: RecordedEngine, prompt, num_tokens: int) -> None:
    for position in range(len(prompt), len(prompt) + num_tokens):
        key = tuple(prompt), position
        assert torch.equal(engine.recorded.rows[key], plain.recorded.rows[key]), key
