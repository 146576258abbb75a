"""Run requests through an engine and note when their tokens arrive.

Times are taken on the host when a step's results have been settled. Nothing waits for the
device that would not wait without being measured.

What one request said, and which window said it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from sametoken.engine.core import EngineCore
from sametoken.errors import NumericalError
from sametoken.text.detokenizer import make_detokenizer
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.outputs import SpeculationMetrics
from sametoken.types.request import (
    EngineRequest,
    RequestUpdate,
)


@dataclass(frozen=True, slots=True)
class Window:
    """One step of a request.

    Attributes:
        first: index in the answer of the first token that it emitted.
        num_drafts, num_accepted: drafts offered and accepted; 0 for the step that ends a
            prompt.
    """

    first: int
    num_drafts: int
    num_accepted: int

    @property
    def end(self) -> int:
        """Index after the last token that it emitted."""
        return self.first + self.num_accepted + 1


@dataclass(slots=True)
class Trace:
    """The answer to one request, window by window.

    Attributes:
        request: its id.
        token_ids: of the answer, cut at its length; empty where only texts are known.
        windows: in order.
    """

    request: str
    token_ids: list[int] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], num_drafts: int, num_accepted: int) -> None:
        """Note one step, of which ``token_ids`` count."""
        self.windows.append(Window(len(self.token_ids), num_drafts, num_accepted))
        self.token_ids.extend(token_ids)

    def as_json(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Values that JSON knows; ``texts`` has one entry per token."""
        return {
            "request": self.request,
            "token_ids": list(self.token_ids),
            "texts": token_texts(self.token_ids, tokenizer),
            "windows": [asdict(window) for window in self.windows],
        }


def token_texts(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """One text per token that add up to the decoding of the whole; ids without a tokenizer.

    A character of several tokens stands with the last of them.
    """
    if tokenizer is None:
        return [f"{token_id} " for token_id in token_ids]
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=False)
    texts = [detokenizer.append(token_id) for token_id in token_ids]
    if texts:
        texts[-1] += detokenizer.finish()
    return texts


Clock = Callable[[], float]


@dataclass(slots=True)
class RequestRecord:
    """One request; times in seconds of the clock.

    Attributes:
        prompt_len: tokens of its prompt.
        output_len: tokens it is to emit; those of the last window beyond it do not count.
        arrival: when it was handed to the engine.
        first, last: when its first and its last tokens arrived.
        num_first: tokens that arrived first.
        num_emitted: tokens that have arrived.
        trace: its tokens by window, if they are kept.
    """

    prompt_len: int
    output_len: int
    arrival: float
    first: float = 0.0
    last: float = 0.0
    num_first: int = 0
    num_emitted: int = 0
    trace: Trace | None = None

    @property
    def time_to_first_token(self) -> float:
        """Seconds."""
        return self.first - self.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first ones; None if there are none."""
        rest = self.num_emitted - self.num_first
        return (self.last - self.first) / rest if rest else None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One settled step that emitted tokens.

    Attributes:
        settled: when its results were read, in seconds of the clock.
        is_decode: no row of it belonged to a prompt.
        num_requests: requests that got tokens.
        num_tokens: tokens that count.
        context: committed tokens of those requests before the step, summed.
    """

    settled: float
    is_decode: bool
    num_requests: int
    num_tokens: int
    context: int


@dataclass(slots=True)
class Run:
    """What one run of requests brought.

    Attributes:
        batch: the most requests that ran at once.
        seconds: from the first request to the last token.
        requests: in the order of arrival.
        steps: in the order of settlement.
        start: when the first request was handed over.
        speculation: counters of decode windows; the steps that end prompts offer no drafts.
    """

    batch: int
    seconds: float = 0.0
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    start: float = 0.0
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    def steady_steps(self) -> list[tuple[float, StepRecord]]:
        """Decode steps of the whole batch that follow another such step, with their seconds."""
        full = [step.is_decode and step.num_requests == self.batch for step in self.steps]
        return [
            (step.settled - before.settled, step)
            for (before, step), both in zip(
                pairwise(self.steps), map(all, pairwise(full)), strict=True
            )
            if both
        ]


def measure(
    engine: EngineCore,
    requests: Sequence[EngineRequest],
    concurrency: int,
    *,
    num_traced: int = 0,
    advance: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> Run:
    """Run all requests, at most ``concurrency`` of them at once.

    Args:
        engine: idle before and after.
        requests: with the length limit as their only end.
        concurrency: at least 1.
        num_traced: of how many requests, from the first on, the windows are kept.
        advance: called whenever a request is done.
        clock: seconds.

    Raises:
        RequestError: the engine refuses a request.
        NumericalError: a request's logits held NaN.
        EngineDeadError: the engine failed.
    """
    waiting = deque(requests)
    running: dict[str, RequestRecord] = {}
    run = Run(batch=min(concurrency, len(requests)))
    run.start = clock()
    while waiting or running:
        while waiting and len(running) < concurrency:
            request = waiting.popleft()
            running[request.request_id] = record = _record(request, clock())
            if len(run.requests) < num_traced:
                record.trace = Trace(request.request_id)
            run.requests.append(record)
            engine.add_request(request)
        updates = engine.step()
        if not updates:
            continue
        _note_step(run, running, updates, clock())
        for request_id in [i for i, r in running.items() if r.num_emitted == r.output_len]:
            del running[request_id]
            engine.release(request_id)
            advance()
    run.seconds = max((record.last for record in run.requests), default=run.start) - run.start
    while engine.has_unfinished:
        engine.step()
    return run


def _record(request: EngineRequest, now: float) -> RequestRecord:
    prompt_len = len(request.prompt_token_ids)
    return RequestRecord(prompt_len, request.max_total_tokens - prompt_len, now)


def _note_step(
    run: Run, running: dict[str, RequestRecord], updates: Sequence[RequestUpdate], now: float
) -> None:
    # A request that has tokens has its prompt behind it, so no row of this step is a chunk.
    is_decode = all(record.num_emitted for record in running.values())
    num_tokens = context = 0
    for update in updates:
        if update.failed:
            raise NumericalError(
                f"the logits of request {update.request_id} were NaN", "use another dtype"
            )
        record = running[update.request_id]
        context += record.prompt_len + record.num_emitted
        emitted = min(len(update.token_ids), record.output_len - record.num_emitted)
        if record.trace is not None:
            kept = update.token_ids[:emitted]
            record.trace.add(kept, update.num_drafts, update.num_accepted)
        if record.num_emitted:
            run.speculation = run.speculation.with_step(update.num_drafts, update.num_accepted)
        else:
            record.first, record.num_first = now, emitted
        record.last = now
        record.num_emitted += emitted
        num_tokens += emitted
    run.steps.append(StepRecord(now, is_decode, len(updates), num_tokens, context))
