"""Run the requests of an audit on this engine, and record every verify step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sametoken.audit.asks import NUM_CANDIDATES, Answer, Answers, AuditRequest, TopTwo
from sametoken.bench.measure import Window
from sametoken.errors import NumericalError
from sametoken.types.outputs import PositionLogprobs
from sametoken.types.request import EngineRequest, RequestUpdate
from sametoken.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sametoken.engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Options of one run.

    Attributes:
        concurrency: maximum number of running requests.
        eos: tokens that end an answer.
        max_drafts: maximum drafts per step; None uses the engine's.
        shuffled: the requests arrive in another order.
        top: record the two best candidates of every position.
    """

    concurrency: int
    eos: frozenset[int] = frozenset()
    max_drafts: int | None = None
    shuffled: bool = False
    top: bool = False


@dataclass(slots=True)
class _Running:
    request: AuditRequest
    tokens: list[int] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    top: list[TopTwo] = field(default_factory=list)
    failed: bool = False

    def take(self, update: RequestUpdate) -> None:
        """Record the output of a step."""
        self.failed = update.failed
        if not update.samples or update.failed:
            return
        self.windows.append(Window(len(self.tokens), update.num_drafts, update.num_accepted))
        self.tokens.extend(update.token_ids)
        self.top.extend(map(_two_best, update.logprobs or ()))

    def finished(self, eos: frozenset[int]) -> Answer | None:
        """Return the answer if it is complete."""
        most = self.request.max_tokens
        end = min(next((i + 1 for i, t in enumerate(self.tokens) if t in eos), most), most)
        if len(self.tokens) < end and not self.failed:
            return None
        return Answer(
            tuple(self.tokens[:end]),
            tuple(self.windows),
            tuple(self.top[:end]),
            failed=self.failed,
        )


def _two_best(position: PositionLogprobs) -> TopTwo:
    ranked = sorted(position.items(), key=lambda pair: pair[1].rank)
    return tuple((token, found.logprob) for token, found in ranked[:NUM_CANDIDATES])


def run_requests(
    core: EngineCore, requests: Sequence[AuditRequest], settings: RunSettings
) -> Answers:
    """Answer all requests without the prefix cache, so that no run reuses another's KV.

    Args:
        core: idle before and after.
        requests: with unique names.
        settings: options of the run.

    Raises:
        RequestError: a request is longer than the engine allows.
        EngineDeadError: the engine failed.
    """
    order = list(requests)
    if settings.shuffled:
        order = random.Random(1).sample(order, len(order))
    waiting = deque(order)
    running: dict[str, _Running] = {}
    answers: Answers = {}
    while waiting or running:
        while waiting and len(running) < settings.concurrency:
            request = waiting.popleft()
            core.add_request(engine_request(request, settings))
            running[request.name] = _Running(request)
        for update in core.step():
            one = running[update.request_id]
            one.take(update)
            answer = one.finished(settings.eos)
            if answer is not None:
                answers[update.request_id] = answer
                del running[update.request_id]
                core.release(update.request_id)
    while core.has_unfinished:
        core.step()
    return {request.name: answers[request.name] for request in requests}


def run_plain(core: EngineCore, requests: Sequence[AuditRequest], settings: RunSettings) -> Answers:
    """As ``run_requests``, for a baseline: where it has no logits, equality proves nothing.

    Raises:
        NumericalError: the logits of a request were NaN; and as ``run_requests``.
    """
    answers = run_requests(core, requests, settings)
    for name, answer in answers.items():
        if answer.failed:
            raise NumericalError(
                f"without speculation the model gives NaN for prompt {name!r}",
                "check the weights and the dtype",
            )
    return answers


def num_drafts_of(answers: Answers) -> int:
    """Count the verified drafts of a run."""
    return sum(window.num_drafts for answer in answers.values() for window in answer.windows)


def engine_request(request: AuditRequest, settings: RunSettings) -> EngineRequest:
    """Convert a request of the audit to one of the engine."""
    params = SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_tokens,
        logprobs=NUM_CANDIDATES if settings.top else None,
    )
    return EngineRequest(
        request.name,
        request.prompt_token_ids,
        params,
        len(request.prompt_token_ids) + request.max_tokens,
        num_speculative_tokens=settings.max_drafts,
        use_prefix_cache=False,
        lora_name=request.adapter,
    )
