"""The crowd of a stress test: clients with known answers, many of which disconnect early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from cases import MALFORMED, Answer, Case
from connections import Connection, Head, LostError, StaleError, request
from server import PATIENCE_S

#: Behaviours of clients and their weights.
FATES = {
    "whole": 27,
    "stream": 27,
    "slow": 6,
    "trickle": 4,
    "pipeline": 6,
    "leave": 9,
    "vanish": 9,
    "half": 6,
    "malformed": 6,
}
#: Error codes that report the death of the engine process.
ENGINE_CODES = ("engine_dead", "engine_restarting")
_MOST_NAMED = 20


def fates(chance: random.Random) -> Iterator[str]:
    """Behaviours without end, in proportion to their weights: of few clients none is left out."""
    deck = [fate for fate, weight in FATES.items() for _ in range(weight)]
    while True:
        yield from chance.sample(deck, len(deck))


class TurnedAwayError(Exception):
    """The server rejected a request for now.

    Args:
        code: error code.
        retry_after_s: seconds.
    """

    def __init__(self, code: str, retry_after_s: float) -> None:
        super().__init__(code)
        self.code = code
        self.retry_after_s = retry_after_s


class WrongError(Exception):
    """An answer that no request should get."""


@dataclass
class StatsCollector:
    """Outcomes of the requests of all clients.

    Attributes:
        sent: requests by kind of client.
        fates: the crowd's requests by outcome.
        statuses: answers by kind of client and status.
        outcomes: the bomber's requests by name and status.
        thrown: start, seconds and name of each bomb, to find the cause of delays.
        wrong: complete answers that differ from the offline one.
        no_beginning: partial answers that are not a prefix of the offline one.
        lost: by kind of client, requests without a valid answer.
        sent_again: rejected requests by reason; each was answered in the end.
        slowest_s: by kind of client, the longest time and its request.
    """

    sent: Counter = field(default_factory=Counter)
    fates: Counter = field(default_factory=Counter)
    statuses: Counter = field(default_factory=Counter)
    outcomes: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    thrown: list[tuple[float, float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    no_beginning: list[str] = field(default_factory=list)
    lost: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    sent_again: Counter = field(default_factory=Counter)
    slowest_s: dict[str, tuple[float, str]] = field(default_factory=dict)

    def check(self, case: Case, answer: Answer) -> None:
        """Compare a complete or partial answer with the offline one."""
        if not answer.begins(case):
            self._name(self.no_beginning, f"{case.name}: {answer.completions}")
        if answer.is_whole and not answer.equals(case):
            self._name(self.wrong, f"{case.name}: {answer.completions} and not {case.completions}")

    def lose(self, kind: str, what: str) -> None:
        """Record a lost request."""
        self._name(self.lost[kind], what)

    def summary(self) -> str:
        """Return the progress as one line."""
        lost = {kind: len(names) for kind, names in self.lost.items()}
        faults = {"wrong": len(self.wrong), "no beginning": len(self.no_beginning), **lost}
        return f"sent {dict(self.sent)}, faults {faults}, sent again {dict(self.sent_again)}"

    @contextlib.contextmanager
    def timed(self, kind: str, name: str) -> Iterator[None]:
        """Time the block."""
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        if seconds > self.slowest_s.get(kind, (0.0, ""))[0]:
            self.slowest_s[kind] = (seconds, name[:500])

    @staticmethod
    def _name(names: list[str], name: str) -> None:
        # Only the first ones are kept in full.
        names.append(name[:1000] if len(names) < _MOST_NAMED else "and another")


class Client:
    """One client of the crowd, with a persistent connection.

    Args:
        may_restart: returns whether the engine process may have been killed since a time.
    """

    def __init__(
        self,
        address: tuple[str, int],
        cases: list[Case],
        chance: random.Random,
        tally: StatsCollector,
        may_restart: Callable[[float], bool],
    ) -> None:
        self._address, self._cases, self._chance = address, cases, chance
        self._tally, self._may_restart = tally, may_restart
        self._connection: Connection | None = None
        self._fates = {
            "whole": self._ask,
            "stream": self.stream,
            "slow": self._read_slowly,
            "trickle": self._trickle,
            "leave": self._leave,
            "vanish": self._vanish,
        }

    async def visit(self, fate: str) -> int:
        """Send one or several requests with a behaviour of ``FATES``; return their number."""
        self._tally.sent["crowd"] += 1
        if fate == "malformed":
            await self._guarded(fate, self._send_malformed())
        elif fate == "half":
            await self._guarded(fate, self._send_half())
        elif fate == "pipeline":
            cases = self._chance.choices(self._cases, k=self._chance.randint(2, 4))
            self._tally.sent["crowd"] += len(cases) - 1
            await self._guarded(fate, self._pipeline(cases))
            return len(cases)
        else:
            await self._guarded(fate, self._until_answered(fate, self._chance.choice(self._cases)))
        return 1

    def leave(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _guarded(self, fate: str, work: object) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work
        except (LostError, WrongError, TimeoutError, ValueError, KeyError) as error:
            self.leave()
            # An unreadable answer counts as lost.
            self._tally.lose("crowd", f"{fate}: {error!r}")

    async def _until_answered(self, fate: str, case: Case) -> None:
        """Send one request, and retry while the server rejects it for now."""
        while True:
            began, answer = time.monotonic(), Answer()
            try:
                with self._tally.timed("crowd", case.name):
                    became = await self._fates[fate](case, answer)
            except TurnedAwayError as error:
                self.leave()
                self._tally.check(case, answer)
                await self._come_again(error, began)
                continue
            self._tally.fates[became] += 1
            self._tally.check(case, answer)
            return

    async def _come_again(self, error: TurnedAwayError, began: float) -> None:
        """Wait before a retry.

        Raises:
            WrongError: the server reports a dead engine that was not killed.
        """
        if error.code in ENGINE_CODES and not self._may_restart(began):
            raise WrongError(f"the engine died without a kill: {error}")
        self._tally.sent_again[error.code] += 1
        await asyncio.sleep(min(error.retry_after_s, 1.0) * (0.5 + self._chance.random()))

    @contextlib.asynccontextmanager
    async def _sent(self, content: bytes, path: str) -> AsyncIterator[tuple[Connection, Head]]:
        """Send a request, reconnecting if the connection was closed, and read the head."""
        try:
            head = await self._send(request("POST", path, content))
            yield self._connection, head
        except BaseException:
            # Unread bytes must not be taken for the next answer.
            self.leave()
            raise
        if head.headers.get("connection") == "close":
            self.leave()

    async def _send(self, data: bytes) -> Head:
        if self._connection is not None:
            self._connection.write(data)
            try:
                return await self._connection.head()
            except StaleError:
                self.leave()
        self._connection = await Connection.open(self._address)
        self._connection.write(data)
        return await self._connection.head()

    async def _ask(self, case: Case, answer: Answer) -> str:
        async with self._sent(case.whole_content, case.path) as (connection, head):
            self._take_whole(head, await connection.body(head), answer)
        return "whole"

    def _take_whole(self, head: Head, body: bytes, answer: Answer) -> None:
        self._note(head)
        if head.status != 200:
            raise refusal(head, body)
        answer.take(json.loads(body))
        answer.is_whole = True

    async def stream(
        self, case: Case, answer: Answer, *, pause_s: float = 0.0, patience: int | None = None
    ) -> str:
        """Read events with random pauses, to the end or up to ``patience`` events."""
        num_events = 0
        async with self._sent(case.stream_content, case.path) as (connection, head):
            self._note(head)
            if head.status != 200:
                raise refusal(head, await connection.body(head))
            async for event in connection.events(head):
                if event is None:
                    answer.is_whole = True
                elif "error" in event:
                    raise event_error(event)
                else:
                    answer.take(event)
                num_events += 1
                if num_events == patience and not answer.is_whole:
                    self.leave()
                    return "left in mid-stream" if answer.has_begun else "left before a token"
                if pause_s:
                    await asyncio.sleep(2 * pause_s * self._chance.random())
        if not answer.is_whole:
            raise LostError("the stream ended before the answer")
        return "read slowly" if pause_s else "streamed"

    async def _read_slowly(self, case: Case, answer: Answer) -> str:
        return await self.stream(case, answer, pause_s=0.03)

    async def _leave(self, case: Case, answer: Answer) -> str:
        return await self.stream(case, answer, patience=self._chance.randint(1, 8))

    async def _vanish(self, case: Case, answer: Answer) -> str:
        """Disconnect after a short time, often before the first token."""
        read = self._chance.choice((self._ask, self.stream))
        reading = asyncio.create_task(read(case, answer))
        await asyncio.wait((reading,), timeout=0.05 * self._chance.random())
        reading.cancel()
        await asyncio.wait((reading,))
        if not reading.cancelled():
            return reading.result()
        return "left in mid-stream" if answer.has_begun else "left before a token"

    async def _trickle(self, case: Case, answer: Answer) -> str:
        """Send the request in pieces."""
        self.leave()
        self._connection = await Connection.open(self._address)
        data = request("POST", case.path, case.whole_content)
        cuts = sorted(self._chance.sample(range(1, len(data)), 4))
        for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
            self._connection.write(data[start:end])
            await asyncio.sleep(0.02 * self._chance.random())
        head = await self._connection.head()
        self._take_whole(head, await self._connection.body(head), answer)
        return "sent in pieces"

    async def _pipeline(self, cases: list[Case]) -> None:
        """Pipeline several requests and read the answers in order."""
        self.leave()
        left = list(cases)
        while left:
            began = time.monotonic()
            connection = await Connection.open(self._address)
            connection.write(
                b"".join(request("POST", case.path, case.whole_content) for case in left)
            )
            try:
                while left:
                    head, answer = await connection.head(), Answer()
                    self._take_whole(head, await connection.body(head), answer)
                    self._tally.fates["pipelined"] += 1
                    self._tally.check(left.pop(0), answer)
            except TurnedAwayError as error:
                await self._come_again(error, began)
            except StaleError:
                # A server may close after any answer; the rest is sent again.
                self._tally.sent_again["pipeline closed"] += 1
            finally:
                connection.close()

    async def _send_half(self) -> None:
        """Send a request that is truncated in its head or its body."""
        case = self._chance.choice(self._cases)
        data = request("POST", case.path, case.whole_content)
        connection = await Connection.open(self._address)
        connection.write(data[: self._chance.randrange(1, len(data))])
        await asyncio.sleep(0.02 * self._chance.random())
        connection.close()
        self._tally.fates["sent by half"] += 1

    async def _send_malformed(self) -> None:
        path, content = self._chance.choice(MALFORMED)
        began, status = time.monotonic(), 503
        # Without an engine the server may say so before it looks at a request.
        while status == 503:
            async with self._sent(content, path) as (connection, head):
                body = await connection.body(head)
            self._note(head)
            status = head.status
            if status == 503 and isinstance(error := refusal(head, body), TurnedAwayError):
                await self._come_again(error, began)
            elif not 400 <= status < 500 or not json.loads(body)["error"]["message"]:
                raise WrongError(f"{status} to {content[:80]!r}")
        self._tally.fates["refused"] += 1

    def _note(self, head: Head) -> None:
        self._tally.statuses[f"crowd {head.status}"] += 1


def refusal(head: Head, body: bytes) -> Exception:
    """Classify an answer other than 200 to a valid request."""
    if head.status in (429, 503) and head.retry_after is not None:
        error = json.loads(body)["error"]
        return TurnedAwayError(error["code"] or str(head.status), float(head.retry_after))
    return WrongError(f"{head.status} {body[:300]!r}")


def event_error(event: dict) -> Exception:
    """Classify an error event in the stream of a valid request."""
    error = event["error"]
    if error["type"] in ("service_unavailable_error", "rate_limit_error"):
        return TurnedAwayError(error["code"], 1.0)
    return WrongError(f"error event {event}")
