"""The attackers of a stress test beside the crowd: bomber, half-openers, and engine killer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass, field

from bombs import COMPLETIONS, bombs
from connections import Connection, Head, LostError, fetch, request
from crowd import StatsCollector
from server import PATIENCE_S, Server

#: Allowed statuses of an answer to a bomb. 499 is never sent.
REFUSALS = {400, 404, 405, 408, 411, 413, 422, 431, 429, 503}
AGAIN_LATER = {429, 503}
_MUTATIONS_PER_BOMB = 10
#: Number of bytes that a half-opener sends one by one, a second apart.
_NUM_DRIPS = 10
#: Requests may still report an engine's death this long after the next one is ready.
_ECHO_S = 2.0


@dataclass
class Times:
    """Intervals from the kill of an engine process until the next is ready; monotonic seconds."""

    windows: list[list[float]] = field(default_factory=list)

    def covers(self, began: float, ended: float) -> bool:
        """Return whether an interval overlaps one without an engine process."""
        return any(began <= end and start <= ended for start, end in self.windows)

    def since(self, began: float) -> bool:
        """Return whether the engine process was missing at any time since then."""
        return self.covers(began, time.monotonic())


@dataclass
class Bomber:
    """Sends hostile requests in sequence and checks status and time of the answers.

    Attributes:
        budget_s: time limit of an answer.
        pause_s: pause after a bomb.
    """

    address: tuple[str, int]
    chance: random.Random
    tally: StatsCollector
    budget_s: float
    pause_s: float

    async def run(self) -> None:
        """Run until cancelled."""
        for name, path, content in bombs(self.chance, _MUTATIONS_PER_BOMB):
            await self._throw(name, path, content)
            await asyncio.sleep(0.02 if name == "mutation" else self.pause_s)

    async def _throw(self, name: str, path: str, content: bytes) -> None:
        self.tally.sent["bomber"] += 1
        shown = f"{name}: {path}, {len(content)} bytes: {_shown(content)}"
        began = time.monotonic()
        try:
            with self.tally.timed("bomber", shown):
                async with asyncio.timeout(PATIENCE_S):
                    head, body = await fetch(self.address, "POST", path, content)
        except (LostError, TimeoutError) as error:
            self.tally.lose("bomber", f"{shown}: {error!r}")
            return
        finally:
            seconds = time.monotonic() - began
            self.tally.thrown.append((began, seconds, shown))
        self.tally.statuses[f"bomber {head.status}"] += 1
        self.tally.outcomes[name][str(head.status)] += 1
        fault = fault_of(head, body)
        if fault or seconds > self.budget_s:
            fault = fault or f"{seconds:.1f} s, which is too long"
            self.tally.lose("bomber", f"{fault}: {shown}: {head.status} {body[:300]!r}")


def _shown(content: bytes) -> str:
    """Return both ends of a body."""
    text = content.decode(errors="replace")
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


def fault_of(head: Head, body: bytes) -> str:
    """Return what is wrong with an answer to a hostile request, or ""."""
    if head.status == 200:
        return _fault_of_success(head, body)
    if head.status not in REFUSALS:
        return f"status {head.status}"
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return "no error of OpenAI's shape"
    if not error["message"] or set(error) != {"message", "type", "param", "code"}:
        return "no error of OpenAI's shape"
    if head.status in AGAIN_LATER and head.retry_after is None:
        return "no Retry-After"
    return ""


def _fault_of_success(head: Head, body: bytes) -> str:
    if not head.headers["content-type"].startswith("text/event-stream"):
        return "" if isinstance(json.loads(body), dict) else "no JSON object"
    *events, done, rest = body.split(b"\n\n")
    if done != b"data: [DONE]" or rest:
        return "a stream without an end"
    errors = [json.loads(event.removeprefix(b"data: ")).get("error") for event in events]
    defects = [error for error in errors if error and error["type"] == "server_error"]
    return f"error event {defects[0]}" if defects else ""


@dataclass
class HalfOpener:
    """Opens connections and sends incomplete requests, which the server has to close.

    Attributes:
        budget_s: time in which the server has to close.
    """

    address: tuple[str, int]
    chance: random.Random
    tally: StatsCollector
    budget_s: float

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            kind = self.chance.choice(("half a head", "half a body", "a byte short", "in drips"))
            try:
                await self._hold(kind)
            except LostError as error:
                self.tally.lose("half-openers", f"{kind}: {error!r}")
                await asyncio.sleep(1.0)

    async def _hold(self, kind: str) -> None:
        data = request("POST", COMPLETIONS, b'{"prompt": "the", "max_tokens": 1}')
        end_of_head = data.index(b"\r\n\r\n")
        length = {
            "half a head": self.chance.randrange(1, end_of_head),
            "half a body": self.chance.randrange(end_of_head + 4, len(data) - 1),
            "a byte short": len(data) - 1,
            "in drips": 1,
        }[kind]
        self.tally.sent["half-openers"] += 1
        connection = await Connection.open(self.address)
        try:
            connection.write(data[:length])
            with self.tally.timed("half-openers", kind):
                async with asyncio.timeout(self.budget_s):
                    await self._wait(connection, data[length : length + _NUM_DRIPS], kind)
            self.tally.fates[f"closed: {kind}"] += 1
        except TimeoutError:
            self.tally.lose("half-openers", f"{kind}: held for {self.budget_s:g} s")
        finally:
            connection.close()

    async def _wait(self, connection: Connection, drips: bytes, kind: str) -> None:
        """Wait until the server closes, sending single bytes so that the connection is not idle."""
        ended = asyncio.create_task(connection.ended())
        try:
            for drip in drips if kind == "in drips" else b"":
                await asyncio.wait((ended,), timeout=1.0)
                if ended.done():
                    break
                connection.write(bytes([drip]))
            await ended
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)


@dataclass
class Killer:
    """Kills the engine process and waits for the next one.

    Attributes:
        times: collects the intervals without an engine.
    """

    address: tuple[str, int]
    server: Server
    times: Times
    tally: StatsCollector
    num_kills: int = 0

    async def kill(self) -> None:
        """Kill the engine process, if there is one."""
        window = [time.monotonic(), float("inf")]
        self.times.windows.append(window)
        if not await asyncio.to_thread(self.server.kill_engine):
            self.times.windows.remove(window)
            self.tally.lose("killer", "there is no engine process")
            return
        self.num_kills += 1
        try:
            with self.tally.timed("killer, until ready", "SIGKILL"):
                await self._until_back()
        except TimeoutError:
            self.tally.lose("killer", "no engine process came after the one that was ended")
        window[1] = time.monotonic() + _ECHO_S

    async def _until_back(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            # The server notices after some milliseconds.
            await self._until_ready(False)
            await self._until_ready(True)

    async def _until_ready(self, wanted: bool) -> None:
        is_ready = not wanted
        while is_ready is not wanted:
            with contextlib.suppress(LostError):
                head, _ = await fetch(self.address, "GET", "/ready")
                is_ready = head.status == 200
            await asyncio.sleep(0.02)
