"""Run requests through an engine and record when their tokens arrive, window by window.

Times are taken on the host when a step's output has been processed. Measuring adds no
synchronization with the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sametoken.errors import NumericalError
from sametoken.text.detokenizer import make_detokenizer
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.outputs import SpeculationCounts
from sametoken.types.request import EngineRequest, RequestUpdate

if TYPE_CHECKING:
    from sametoken.engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class Window:
    """One step of a request.

    Attributes:
        first: index in the answer of the first emitted token.
        num_drafts, num_accepted: drafts offered and accepted; 0 for the last prefill step.
    """

    first: int
    num_drafts: int
    num_accepted: int

    @property
    def end(self) -> int:
        """Index after the last emitted token."""
        return self.first + self.num_accepted + 1


@dataclass(slots=True)
class Trace:
    """The answer to one request, window by window.

    Attributes:
        request: request id.
        token_ids: the answer, truncated to its length; empty if only texts are known.
        windows: in order.
    """

    request: str
    token_ids: list[int] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], num_drafts: int, num_accepted: int) -> None:
        """Add one step, whose ``token_ids`` belong to the answer."""
        self.windows.append(Window(len(self.token_ids), num_drafts, num_accepted))
        self.token_ids.extend(token_ids)

    def as_json(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Convert to JSON values; ``texts`` has one entry per token."""
        return {
            "request": self.request,
            "token_ids": list(self.token_ids),
            "texts": token_texts(self.token_ids, tokenizer),
            "windows": [asdict(window) for window in self.windows],
        }


def token_texts(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Decode each token, so that the texts concatenate to the whole; ids without a tokenizer.

    A character that spans several tokens belongs to the last of them.
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
        prompt_len: prompt tokens.
        output_len: tokens to emit; further tokens of the last window do not count.
        arrival: when it was added to the engine.
        first, last: when its first and its last tokens arrived.
        num_first: tokens that arrived at ``first``.
        num_emitted: tokens that have arrived.
        trace: its tokens by window, if recorded.
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
        """Seconds per token after the first ones; None if there are no others."""
        rest = self.num_emitted - self.num_first
        return (self.last - self.first) / rest if rest else None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One processed step that emitted tokens.

    Attributes:
        processed: when its output was processed, in seconds of the clock.
        is_decode: it had no prefill rows.
        num_requests: requests that got tokens.
        num_tokens: tokens that count.
        context: sum of those requests' committed tokens before the step.
    """

    processed: float
    is_decode: bool
    num_requests: int
    num_tokens: int
    context: int


@dataclass(slots=True)
class Run:
    """The records of one run.

    Attributes:
        batch: maximum number of running requests.
        seconds: from the first request to the last token.
        requests: in order of arrival.
        steps: in the order they were processed.
        start: when the first request was added.
        speculation: counters of decode windows; prefill steps offer no drafts.
    """

    batch: int
    seconds: float = 0.0
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    start: float = 0.0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    def steady_steps(self) -> list[tuple[float, StepRecord]]:
        """Decode steps of the full batch that follow another one, with their seconds."""
        return [
            (step.processed - before.processed, step)
            for before, step in pairwise(self.steps)
            if before.is_decode and before.num_requests == self.batch
            if step.is_decode and step.num_requests == self.batch
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
    """Run all requests, at most ``concurrency`` at once.

    Args:
        engine: idle before and after.
        requests: they end at their length limit only.
        concurrency: at least 1.
        num_traced: number of leading requests whose windows are recorded.
        advance: called for each finished request.
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
            prompt_len = len(request.prompt_token_ids)
            record = RequestRecord(prompt_len, request.max_total_tokens - prompt_len, clock())
            running[request.request_id] = record
            if len(run.requests) < num_traced:
                record.trace = Trace(request.request_id)
            run.requests.append(record)
            engine.add_request(request)
        updates = engine.step()
        if not updates:
            continue
        _record_step(run, running, updates, clock())
        for request_id in [i for i, r in running.items() if r.num_emitted == r.output_len]:
            del running[request_id]
            engine.release(request_id)
            advance()
    run.seconds = max((record.last for record in run.requests), default=run.start) - run.start
    while engine.has_unfinished:
        engine.step()
    return run


def _record_step(
    run: Run, running: dict[str, RequestRecord], updates: Sequence[RequestUpdate], now: float
) -> None:
    # A request with tokens has finished prefill: if all have, the step has no prefill rows.
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
            run.speculation.add(update.num_drafts, update.num_accepted)
        else:
            record.first, record.num_first = now, emitted
        record.last = now
        record.num_emitted += emitted
        num_tokens += emitted
    run.steps.append(StepRecord(now, is_decode, len(updates), num_tokens, context))
