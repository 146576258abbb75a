"""Shadow audit: finished requests are replayed without speculation and compared."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from sametoken.engine.input_processor import ProcessedRequest
from sametoken.serving.stats import AuditDifference, AuditStats
from sametoken.types.outputs import RequestOutput
from sametoken.types.request import EngineRequest, RequestUpdate

_MAX_PENDING = 256
_logger = logging.getLogger("sametoken")


@dataclass(frozen=True, slots=True)
class _Case:
    replay: EngineRequest
    served: tuple[int, ...]
    request_id: str


@dataclass(slots=True)
class _Replay:
    case: _Case
    token_ids: list[int] = field(default_factory=list)


class ShadowAudit:
    """Chooses completions to replay, one at a time, and compares them with the served tokens.

    A replay decodes without drafts and without the prefix cache, so it shares no state with the
    served run. It ends where the served completion ended.

    Args:
        rate: share of requests to replay, 0..1; chosen by a hash of their ids.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._pending: deque[_Case] = deque()
        self._running: _Replay | None = None
        self._stats = AuditStats()
        self._num_begun = 0
        # Of the ``Submit`` before the newest weights or adapter; -1: all are those of the start.
        self._changed_after = -1

    @property
    def stats(self) -> AuditStats:
        """The counters now."""
        return replace(self._stats, num_pending=len(self._pending) + self.is_replaying)

    @property
    def is_replaying(self) -> bool:
        """Whether a replay is in the engine."""
        return self._running is not None

    def note_finished(
        self, request: ProcessedRequest, output: RequestOutput, num_submits: int
    ) -> None:
        """Queue the completions of a finished request for replay if it is chosen.

        Aborted and failed completions are left out, and those whose adapter may be gone.

        Args:
            request, output: the request, which the present weights served.
            num_submits: the number of its ``Submit``.
        """
        is_old = num_submits <= self._changed_after
        has_adapter = request.completions[0].lora_name is not None
        if (is_old and has_adapter) or not is_chosen(request.request_id, self._rate):
            return
        for completion, result in zip(request.completions, output.outputs, strict=True):
            if result.finish_reason not in ("stop", "length") or not result.token_ids:
                continue
            if len(self._pending) >= _MAX_PENDING:
                self._pending.popleft()
                self._stats = replace(self._stats, num_dropped=self._stats.num_dropped + 1)
            replay = _replay_of(completion, len(result.token_ids))
            self._pending.append(_Case(replay, result.token_ids, completion.request_id))

    def begin(self) -> EngineRequest | None:
        """Begin the next replay, in idle time; None if none is pending or one runs already."""
        if self.is_replaying or not self._pending:
            return None
        case = self._pending.popleft()
        # Another id each time: updates of an interrupted replay may still be on their way.
        self._num_begun += 1
        replay = replace(case.replay, request_id=f"{case.request_id}#replay#{self._num_begun}")
        self._running = _Replay(replace(case, replay=replay))
        return replay

    def interrupt(self) -> str | None:
        """Put off the running replay; returns its id to release, if one runs."""
        if self._running is None:
            return None
        case, self._running = self._running.case, None
        self._pending.appendleft(case)
        return case.replay.request_id

    def restart(self, weight_version: int) -> None:
        """Drop what weights of this version served, unless the next process begins with them."""
        self.abandon()
        if weight_version or self._changed_after >= 0:
            self.change(-1)

    def change(self, num_submits: int) -> str | None:
        """Drop what other weights, or perhaps another adapter of a name, served.

        Args:
            num_submits: the number of the newest ``Submit``.

        Returns:
            The id of a running replay, to release.
        """
        self._changed_after = num_submits
        interrupted = self.interrupt()
        dropped = self._stats.num_dropped + len(self._pending)
        self._stats = replace(self._stats, num_dropped=dropped)
        self._pending.clear()
        return interrupted

    def abandon(self) -> None:
        """Drop the running replay, which may have ended the engine process."""
        if self._running is not None:
            self._running = None
            self._stats = replace(self._stats, num_dropped=self._stats.num_dropped + 1)

    def take_refusal(self, request_ids: Collection[str]) -> None:
        """Drop the running replay if it is among what the engine refused."""
        if self._running is not None and self._running.case.replay.request_id in request_ids:
            self.abandon()

    def take(self, updates: Iterable[RequestUpdate]) -> str | None:
        """Take in the replay's updates of one step; returns its id to release once compared."""
        for update in updates:
            running = self._running
            if running is None or update.request_id != running.case.replay.request_id:
                continue
            num_compared = len(running.token_ids)
            running.token_ids.extend(update.token_ids)
            if self._compare(running, num_compared, failed=update.failed):
                return running.case.replay.request_id
        return None

    def _compare(self, running: _Replay, num_compared: int, *, failed: bool) -> bool:
        """Count a replay that has differed or ended; returns whether it has.

        The first ``num_compared`` of its tokens are known to be the same.
        """
        case, replayed = running.case, running.token_ids
        position = _first_difference(case.served, replayed, num_compared)
        if position is None and len(replayed) < len(case.served) and not failed:
            return False
        if position is None and failed:
            position = len(replayed)
        self._running = None
        self._stats = replace(self._stats, num_audited=self._stats.num_audited + 1)
        if position is not None:
            token = replayed[position] if position < len(replayed) else None
            self._report(AuditDifference(case.request_id, position, case.served[position], token))
        return True

    def _report(self, difference: AuditDifference) -> None:
        self._stats = replace(
            self._stats, num_mismatched=self._stats.num_mismatched + 1, last_difference=difference
        )
        _logger.error(
            "shadow audit: request %s differs at output token %d: served %s, replayed %s",
            difference.request_id,
            difference.position,
            difference.served,
            difference.replayed,
        )


def is_chosen(request_id: str, rate: float) -> bool:
    """Whether a request belongs to the share ``rate`` that is replayed."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < rate * 2**64


def _replay_of(completion: EngineRequest, num_tokens: int) -> EngineRequest:
    return replace(
        completion,
        params=replace(completion.params, logprobs=None, prompt_logprobs=None),
        max_total_tokens=len(completion.prompt_token_ids) + num_tokens,
        num_speculative_tokens=0,
        use_prefix_cache=False,
    )


def _first_difference(served: tuple[int, ...], replayed: list[int], start: int) -> int | None:
    """The first place from ``start`` on where both have a token, and not the same."""
    places = range(start, min(len(served), len(replayed)))
    return next((place for place in places if served[place] != replayed[place]), None)
