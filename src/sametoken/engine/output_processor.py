"""Output processing: emitted tokens to text, stops, log-probabilities and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sametoken.engine.failures import failure_of
from sametoken.engine.input_processor import ProcessedRequest
from sametoken.text.detokenizer import make_detokenizer
from sametoken.text.stop_strings import StopCursor, StopMatch, StopStrings
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.growing import Beginning, GrowingText
from sametoken.types.outputs import (
    CompletionOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    SpeculationCounts,
)
from sametoken.types.request import EngineRequest, RequestUpdate


@dataclass(frozen=True, slots=True)
class ProcessedUpdates:
    """The result of processing updates.

    Attributes:
        shown: finished requests, and streamed ones with new tokens; each has its ``output`` by now.
        released: ids of finished engine requests, each with the tokens of prompt and output
            that it kept, for ``EngineCore.release``.
        num_tokens: tokens that the updates added to outputs; those cut at a stop are none.
    """

    shown: tuple[_Request, ...]
    released: Mapping[str, int]
    num_tokens: int = 0

    @property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """The outputs of what is shown."""
        return tuple(one.output() for one in self.shown)


class OutputProcessor:
    """Accumulates the outputs of unfinished requests.

    Args:
        tokenizer: None leaves all texts empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._completions: dict[str, tuple[_Request, _Completion]] = {}

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished requests."""
        return len(self._requests)

    def add(self, processed: ProcessedRequest, now: float, *, stream: bool) -> None:
        """Register a request; ``now`` is in seconds of a monotonic clock.

        With ``stream`` every step gives a partial output, once there are the prompt's candidates
        if they are wanted; else only the last step gives one.
        """
        request = _Request(processed, now, self._tokenizer, stream=stream)
        self._requests[processed.request_id] = request
        for completion in request.completions:
            self._completions[completion.request.request_id] = (request, completion)

    def begin(self, request_ids: Iterable[str], now: float) -> None:
        """Note the first step of completions; ids of finished requests are ignored."""
        for request_id in request_ids:
            if (found := self._completions.get(request_id)) is not None:
                found[0].begin(now)

    def process(self, updates: Iterable[RequestUpdate], now: float) -> ProcessedUpdates:
        """Process one step's updates; those of finished requests are ignored."""
        touched, released, num_tokens = dict[str, _Request](), dict[str, int](), 0
        for update in updates:
            found = self._completions.get(update.request_id)
            if found is None:
                continue
            request, completion = found
            num_before = len(completion.token_ids)
            request.take(completion, update, now)
            num_tokens += len(completion.token_ids) - num_before
            if completion.finish_reason is not None:
                del self._completions[update.request_id]
                released[update.request_id] = completion.num_kept_tokens
            elif not request.stream:
                continue
            touched[request.request_id] = request
        shown = [request for request in touched.values() if request.is_shown or request.finished]
        for request in shown:
            if request.finished:
                del self._requests[request.request_id]
        return ProcessedUpdates(tuple(shown), released, num_tokens)

    def abort(self, request_id: str, now: float) -> ProcessedUpdates:
        """Abort a request, keeping its output so far; an unknown id gives no output."""
        if request_id not in self._requests:
            return ProcessedUpdates((), {})
        request = self._requests[request_id]
        released: dict[str, int] = {}
        for completion in self.forget(request_id):
            completion.end("abort")
            released[completion.request.request_id] = completion.num_kept_tokens
        request.end(now)
        return ProcessedUpdates((request,), released)

    def forget(self, request_id: str) -> list[_Completion]:
        """Drop a request as it is: an output that is read later has not ended.

        Returns:
            Its unfinished completions.
        """
        completions = self._requests.pop(request_id).completions
        held = (self._completions.pop(one.request.request_id, None) for one in completions)
        return [one[1] for one in held if one is not None]


class _Request:
    """The completions of one prompt."""

    def __init__(
        self, processed: ProcessedRequest, now: float, tokenizer: Tokenizer | None, *, stream: bool
    ) -> None:
        self.request_id = processed.request_id
        self.stream = stream
        self.finished = False
        self.completions = [
            _Completion(index, request, tokenizer, processed.stops)
            for index, request in enumerate(processed.completions)
        ]
        self._processed = processed
        self._speculation = SpeculationCounts()
        #: Other fields of ``RequestMetrics``, which is made where it is shown.
        self._metrics: dict[str, Any] = {"arrival_time": now}
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] = (None,)
        self._weight_versions: tuple[int, int] | None = None

    @property
    def is_shown(self) -> bool:
        """Whether a stream shows it: the prompt's candidates come with the first completion."""
        first, waits = self.completions[0], self._processed.params.prompt_logprobs is not None
        return self.stream and bool(not waits or first.token_ids or first.finish_reason)

    def begin(self, now: float) -> None:
        """The first step of one of its completions."""
        self._metrics.setdefault("first_scheduled_time", now)

    def take(self, completion: _Completion, update: RequestUpdate, now: float) -> None:
        if completion.index == 0:
            if update.prompt_logprobs:
                # By chunks of the prompt, so the copies are few.
                self._prompt_logprobs += tuple(map(completion.named, update.prompt_logprobs))
            self._metrics["num_cached_tokens"] = update.num_cached
        if update.samples and not update.failed:
            self._speculation.add(update.num_drafts, update.num_accepted)
        if update.weight_versions != self._weight_versions:
            first, last = update.weight_versions
            oldest, newest = self._weight_versions or (first, last)
            self._weight_versions = min(oldest, first), max(newest, last)
        completion.take(update)
        if completion.token_ids:
            self._metrics.setdefault("first_token_time", now)
        if completion.finish_reason and all(one.finish_reason for one in self.completions):
            self.end(now)

    def end(self, now: float) -> None:
        """All its completions have ended."""
        self.finished = True
        self._metrics["finished_time"] = now

    def output(self) -> RequestOutput:
        # With a token, or none: what a failed request has scored depends on chunk borders.
        begun = bool(self.completions[0].token_ids)
        wanted = self._processed.params.prompt_logprobs is not None and begun
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._processed.prompt.text,
            prompt_token_ids=self._processed.prompt.token_ids,
            outputs=tuple(completion.output() for completion in self.completions),
            finished=self.finished,
            metrics=RequestMetrics(**self._metrics, speculation=self._speculation.metrics()),
            prompt_logprobs=self._prompt_logprobs if wanted else None,
            weight_versions=self._weight_versions,
        )


class _Completion:
    """An unfinished completion."""

    def __init__(
        self, index: int, request: EngineRequest, tokenizer: Tokenizer | None, stops: StopStrings
    ) -> None:
        params = request.params
        self.index = index
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._error: Exception | None = None
        self._text = GrowingText()
        #: Of each token, where its text begins.
        self._starts: list[int] = []
        #: Of the text, once it has ended: what follows a stop string is none of it.
        self._num_characters: int | None = None
        self._last_output: CompletionOutput | None = None
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = make_detokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            prompt=request.prompt_token_ids,
        )
        self._stops = StopCursor(stops)
        self._stop_ids = frozenset(request.stop_token_ids)
        self._most_tokens = request.max_total_tokens - len(request.prompt_token_ids)
        self._logprobs: list[PositionLogprobs] = []
        self._cumulative_logprob = 0.0
        self._windows: list[tuple[int, int]] = []
        self._routed: list[np.ndarray[Any, Any]] = []

    def take(self, update: RequestUpdate) -> None:
        """Add the update's tokens up to the first that ends the completion."""
        if update.failed:
            self._error = failure_of(update)
            self.end("error")
            return
        if update.routed_experts is not None:
            self._routed.append(update.routed_experts)
        if update.samples:
            self._windows.append((update.num_drafts, update.num_accepted))
        for offset, token_id in enumerate(update.token_ids):
            self.token_ids.append(token_id)
            if update.logprobs is not None:
                self._logprobs.append(self.named(update.logprobs[offset]))
                self._cumulative_logprob += update.logprobs[offset][token_id].logprob
            self._add(token_id)
            if self.finish_reason is not None:
                return

    def _add(self, token_id: int) -> None:
        """Precedence at one token: stop string, then stop token, then length."""
        is_stop_token = token_id in self._stop_ids
        held = self._detokenizer.held
        # At the end of the text, an incomplete character is final.
        before = self._detokenizer.finish() if is_stop_token else ""
        added = before + self._detokenizer.append(token_id)
        self._starts.append(len(self._text) + len(before) + self._detokenizer.num_before)
        if self.request.params.stop and self._ends_at_stop_string(added, held):
            return
        is_kept = not is_stop_token or self.request.params.include_stop_str_in_output
        self._text.append(added if is_kept else before)
        if is_stop_token:
            requested = token_id in (self.request.params.stop_token_ids or ())
            self._stop_reason = token_id if requested else None
            self.end("stop")
        elif len(self.token_ids) >= self._most_tokens:
            self.end("length")

    def _ends_at_stop_string(self, added: str, held: str) -> bool:
        """End at a stop string whose last character came with the newest token, if there is one.

        Args:
            added: what the text gets with this token.
            held: characters that were held back before it, in which none has ended.
        """
        # A stop string counts if at least ``min_tokens`` tokens precede the one that it ends in.
        has_min_tokens = len(self.token_ids) > self.request.params.min_tokens
        known = len(held) if added.startswith(held) else 0
        self._stops.feed(added[:known], checked=False)
        match = self._stops.feed(added[known:], checked=has_min_tokens)
        now_held = self._detokenizer.held
        if match is None and has_min_tokens and now_held and now_held != held:
            added += now_held
            match = self._at_the_end_with(added)
        if match is not None:
            self._end_at(match, added)
        return match is not None

    def _at_the_end_with(self, added: str) -> StopMatch | None:
        """The longest stop string that the text ends in with what is added."""
        stops = self.request.params.stop or ()
        size = len(self._text)
        end = self._text.part(max(size - max(map(len, stops)), 0), size) + added
        sizes = [len(stop) for stop in stops if end.endswith(stop)]
        size += len(added)
        return StopMatch(size - max(sizes), size) if sizes else None

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of prompt and output up to the end of the completion."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    def end(self, reason: str) -> None:
        """Finish, and flush the text that was held back."""
        self.finish_reason = reason
        self._text.append(self._detokenizer.finish())
        self._num_characters = len(self._text)

    def output(self) -> CompletionOutput:
        """The output so far."""
        output = self._last_output or self._output()
        if self.finish_reason is not None:
            self._last_output = output
        return output

    def _output(self) -> CompletionOutput:
        size, finished = self._num_characters, self.finish_reason is not None
        if size is None:
            included = self.request.params.include_stop_str_in_output
            size = len(self._text) - (0 if included else self._stops.num_held)
        has_logprobs = self.request.params.logprobs is not None
        logprobs = self._logprobs if has_logprobs else None
        return CompletionOutput.of(
            Beginning(
                self._text, size, self.token_ids, len(self.token_ids), logprobs, self._starts
            ),
            self.index,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            error=self._error,
            windows=tuple(self._windows) if finished else (),
            routed_experts=None if self.finish_reason in (None, "error") else self._experts(),
        )

    def _experts(self) -> np.ndarray[Any, Any] | None:
        # Windows may reach beyond the token that ends the completion.
        return np.concatenate(self._routed)[: self.num_kept_tokens - 1] if self._routed else None

    def named(self, candidates: PositionLogprobs) -> PositionLogprobs:
        """The candidates with their decoded tokens."""
        if self._tokenizer is None:
            return candidates
        decode = self._tokenizer.decode_token
        return {
            token_id: replace(candidate, decoded_token=decode(token_id))
            for token_id, candidate in candidates.items()
        }

    def _end_at(self, match: StopMatch, added: str) -> None:
        self._text.append(added)
        included = self.request.params.include_stop_str_in_output
        self._num_characters = match.end if included else match.start
        self._stop_reason = self._text.part(match.start, match.end)
        self.finish_reason = "stop"
