"""The neighbour of a stress test: a well-behaved client that measures latencies.

    python benchmarks/stress/neighbour.py < job.json > seen.json

It requests ``/health`` every 50 ms on one connection, and streams completions on another.
``job.json`` is one line: the address, and requests with their expected token ids. It stops at the
end of its input. Times are those of the system's monotonic clock.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_EVERY_S = 0.05
_PATIENCE_S = 120.0
_JSON = {"Content-Type": "application/json"}


class Neighbour:
    """Sends requests until the input ends.

    Args:
        address: host and port.
        cases: pairs of a body and the expected token ids.

    Attributes:
        health: start, seconds and status (0: none) of each request to ``/health``.
        waits: start, seconds and token number of each wait for an event; 0 is the first.
        ends: start, seconds and result of each stream: "right", "wrong", or an error.
    """

    def __init__(self, address: str, cases: list[tuple[dict[str, Any], list[int]]]) -> None:
        self._address, self._cases = address, cases
        self._stopped = threading.Event()
        self.health: list[tuple[float, float, int]] = []
        self.waits: list[tuple[float, float, int]] = []
        self.ends: list[tuple[float, float, str]] = []

    def run(self) -> None:
        """Send requests until the input ends."""
        threads = [threading.Thread(target=one) for one in (self._look, self._read)]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        self._stopped.set()
        for thread in threads:
            thread.join()

    def _look(self) -> None:
        client = http.client.HTTPConnection(self._address, timeout=_PATIENCE_S)
        while not self._stopped.is_set():
            began, status = time.monotonic(), 0
            try:
                client.request("GET", "/health")
                response = client.getresponse()
                response.read()
                status = response.status
            except (OSError, http.client.HTTPException):
                client.close()
            seconds = time.monotonic() - began
            self.health.append((began, seconds, status))
            self._stopped.wait(max(0.0, _EVERY_S - seconds))

    def _read(self) -> None:
        number = 0
        while not self._stopped.is_set():
            body, token_ids = self._cases[number % len(self._cases)]
            began, number = time.monotonic(), number + 1
            try:
                found = [token_id for event in self._events(body) for token_id in event]
                end = "right" if found == token_ids else "wrong"
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                end = str(error) or type(error).__name__
            self.ends.append((began, time.monotonic() - began, end))
            # A short pause; a longer one after an error.
            self._stopped.wait(0.01 if end in ("right", "wrong") else 0.5)

    def _events(self, body: dict[str, Any]) -> Iterator[list[int]]:
        """Yield the token ids of each event of a stream.

        Raises:
            RuntimeError: the answer is an error.
        """
        client = http.client.HTTPConnection(self._address, timeout=_PATIENCE_S)
        try:
            since, number = time.monotonic(), 0
            client.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), _JSON)
            response = client.getresponse()
            if response.status != 200:
                raise RuntimeError(_code(response.read()))
            while (line := response.readline()) != b"data: [DONE]\n":
                if not line:
                    raise RuntimeError("the stream ended before the answer")
                if line == b"\n":
                    continue
                now = time.monotonic()
                self.waits.append((since, now - since, number))
                since = now
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(_code(line.removeprefix(b"data: ")))
                found = event["choices"][0].get("token_ids") or []
                number += len(found)
                yield found
        finally:
            client.close()


def _code(body: bytes) -> str:
    error = json.loads(body)["error"]
    return str(error["code"] or error["message"])


def main() -> int:
    job = json.loads(sys.stdin.readline())
    neighbour = Neighbour(job["address"], job["cases"])
    neighbour.run()
    seen = {name: getattr(neighbour, name) for name in ("health", "waits", "ends")}
    json.dump(seen, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
