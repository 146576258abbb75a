"""A server under stress: correctness, latency and memory under all kinds of HTTP clients at once.

    python benchmarks/stress/stress.py MODEL [--requests 100000] [--kills 5] [--out results.json]

An engine in this process first answers requests of all kinds without speculation. Then ``sametoken
serve`` runs in another process, with n-gram drafts and too few KV blocks, under these clients:

crowd         sends the same requests at random: whole, streamed, in pieces, pipelined; some
              clients disconnect early, some send incomplete or malformed requests
bomber        sends hostile requests: bombs, and mutations of valid bodies
half-openers  send incomplete requests, which the server has to close
killer        kills the engine process; lost requests get 503 and are sent again
neighbour     a well-behaved client in another process, which measures latencies

Every complete answer must equal the offline one in tokens, text and log-probabilities, and every
partial answer must be a prefix of it. Bombs must be answered in time. At the end no request and
no memory may be left, and SIGTERM must let the last streams finish. Prints a summary with each
criterion; exits with 1 if one fails. MODEL needs a tokenizer and a chat template.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from attackers import Bomber, HalfOpener, Killer, Times
from cases import COMPLETIONS, NUM_LONG, Answer, Case, make_cases
from connections import LostError, fetch
from crowd import Client, StatsCollector, TurnedAwayError, WrongError, fates
from judge import COUNTED, LEFT, Limits, StressResult
from prometheus_client.parser import text_string_to_metric_families
from server import ENGINE, PATIENCE_S, Server, serving

from sametoken import LLM

VERSIONS = ("sametoken", "torch", "xgrammar", "uvicorn", "fastapi", "starlette", "pydantic")
MAX_TOKENS = 10
_NEIGHBOUR = Path(__file__).with_name("neighbour.py")
_SAMPLE_EVERY_S = 1.0
#: Samples between two progress lines.
_PROGRESS_EVERY = 15


@dataclass(frozen=True)
class Plan:
    """Settings of a stress test.

    Attributes:
        num_requests: requests of the crowd.
        num_clients: concurrent clients of the crowd.
        num_half_openers: concurrent half-openers.
        num_kills: kills of the engine process.
        seed: seed of all random generators.
        bomb_pause_s: the bomber's pause after each bomb.
        limits: upper limits of the results.
        options: the server's command-line options, by field.
    """

    num_requests: int = 100_000
    num_clients: int = 48
    num_half_openers: int = 8
    num_kills: int = 5
    seed: int = 0
    bomb_pause_s: float = 1.0
    limits: Limits = field(default_factory=Limits)
    options: dict[str, Any] = field(default_factory=dict)


class StressTest:
    """Runs all clients against a server and samples its processes.

    Args:
        server: a running server.
        cases: the requests.
        plan: settings of the stress test.
    """

    def __init__(self, server: Server, cases: list[Case], plan: Plan) -> None:
        host, port = server.wait_for_url().removeprefix("http://").split(":")
        self._address = (host, int(port))
        self._server, self._plan = server, plan
        self._cases, self._long_cases = cases[:-NUM_LONG], cases[-NUM_LONG:]
        self._times, self._tally = Times(), StatsCollector()
        self._killer = Killer(self._address, server, self._times, self._tally)
        self._samples: list[dict[str, float]] = []

    async def run(self) -> StressResult:
        """Run from the first request to the exit of the server."""
        began = time.monotonic()
        neighbour = await self._start_neighbour()
        traffic = [asyncio.create_task(one) for one in self._traffic()]
        kills = await self._send_crowd()
        seconds = time.monotonic() - began
        for one in traffic:
            one.cancel()
        ended = await asyncio.gather(*traffic, *kills, return_exceptions=True)
        # The neighbour stops at the end of its input.
        seen, _ = await neighbour.communicate(b"")
        self._require_server()
        left, counted = await self._come_to_rest()
        num_met, exit_code = await self._end()
        defects = [one for one in ended if isinstance(one, Exception)]
        if defects:
            raise defects[0]
        return StressResult(
            limits=self._plan.limits,
            seconds=seconds,
            tally=self._tally,
            times=self._times,
            num_kills=self._killer.num_kills,
            samples=self._samples,
            neighbour=json.loads(seen),
            left=left,
            counted=counted,
            num_met=num_met,
            exit_code=exit_code,
            num_tracebacks=self._server.log.count("Traceback"),
            log_bytes=self._server.log_bytes,
        )

    def _require_server(self) -> None:
        """Exit with the results so far if the server has exited."""
        code = self._server.process.poll()
        if code is not None:
            first = {kind: names[:3] for kind, names in self._tally.lost.items()}
            raise SystemExit(
                f"the server has ended with {code}\n{self._tally.summary()}\n"
                f"first losses: {json.dumps(first, indent=1)}\n"
                f"the end of its log:\n{self._server.log[-3000:]}"
            )

    def _traffic(self) -> list[Any]:
        seed, limits, tally = self._plan.seed, self._plan.limits, self._tally
        chance, pause_s = random.Random(seed + 1), self._plan.bomb_pause_s
        bomber = Bomber(self._address, chance, tally, limits.bomb_s, pause_s)
        half_openers = [
            HalfOpener(self._address, random.Random(seed + 2 + i), tally, limits.half_open_s)
            for i in range(self._plan.num_half_openers)
        ]
        return [self._watch(), bomber.run(), *(one.run() for one in half_openers)]

    async def _send_crowd(self) -> list[asyncio.Task[None]]:
        """Send the crowd's requests and start the kills; return the tasks of the kills."""
        num_left, kills = self._plan.num_requests, []
        every = self._plan.num_requests / (self._plan.num_kills + 1)
        # One order for all clients, whose speeds differ from run to run.
        in_turn = fates(random.Random(self._plan.seed))
        kill_at = [round(every * i) for i in range(1, self._plan.num_kills + 1)]

        async def work(number: int) -> None:
            nonlocal num_left
            chance = random.Random(f"{self._plan.seed} {number}")
            client = Client(self._address, self._cases, chance, self._tally, self._times.since)
            while num_left > 0 and self._server.process.poll() is None:
                if kill_at and num_left <= kill_at[-1]:
                    kill_at.pop()
                    kills.append(asyncio.create_task(self._killer.kill()))
                num_sent = await client.visit(next(in_turn))
                num_left -= num_sent
            client.leave()

        await asyncio.gather(*(work(i) for i in range(self._plan.num_clients)))
        return kills

    async def _start_neighbour(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(_NEIGHBOUR),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        cases = [
            (case.body, case.completions[0].token_ids)
            for case in (*self._long_cases, *self._cases[:8])
            if case.path == COMPLETIONS and len(case.completions) == 1
        ]
        job = {"address": ":".join(map(str, self._address)), "cases": cases}
        process.stdin.write(json.dumps(job).encode() + b"\n")
        await process.stdin.drain()
        return process

    async def _watch(self) -> None:
        """Sample the processes every second."""
        while True:
            held = await asyncio.to_thread(self._server.sample)
            self._samples.append({"at_s": time.monotonic(), **held})
            if len(self._samples) % _PROGRESS_EVERY == 0:
                print(self._tally.summary(), file=sys.stderr, flush=True)
            await asyncio.sleep(_SAMPLE_EVERY_S)

    async def _come_to_rest(self) -> tuple[dict[str, float], dict[str, float]]:
        """Wait until all requests and audits are done; return gauges and counters."""
        deadline = time.monotonic() + PATIENCE_S
        left = await self._metrics(LEFT)
        while any(left.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            left = await self._metrics(LEFT)
        return left, await self._metrics(COUNTED)

    async def _metrics(self, names: tuple[str, ...]) -> dict[str, float]:
        """Read values of the server's metrics."""
        _, body = await fetch(self._address, "GET", "/metrics")
        found = {
            sample.name.removeprefix("sametoken:"): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }
        return {name: found[name] for name in names}

    async def _end(self) -> tuple[int, int | None]:
        """Send SIGTERM while streams are in flight: they must finish and the process must exit."""
        answers = [Answer() for _ in self._long_cases]
        reading = [
            asyncio.create_task(self._read_to_the_end(case, answer))
            for case, answer in zip(self._long_cases, answers, strict=True)
        ]
        while not all(answer.has_begun for answer in answers):
            if all(one.done() for one in reading):
                break
            await asyncio.sleep(0.001)
        num_met = sum(not one.done() for one in reading)
        self._server.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*reading)
        exit_code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            exit_code = await asyncio.to_thread(self._server.process.wait, PATIENCE_S)
        return num_met, exit_code

    async def _read_to_the_end(self, case: Case, answer: Answer) -> None:
        chance = random.Random(0)
        client = Client(self._address, [case], chance, self._tally, self._times.since)
        try:
            self._tally.fates[await client.stream(case, answer, pause_s=0.005)] += 1
        except (LostError, WrongError, TurnedAwayError) as error:
            self._tally.lose("drain", f"{case.name}: {error!r}")
        self._tally.check(case, answer)
        client.leave()


def run_stress_test(model: str, plan: Plan) -> StressResult:
    """Serve a model under stress and return the results."""
    cases = make_cases(LLM(model, **ENGINE), MAX_TOKENS, plan.seed)
    restarts = {"max_restarts": plan.num_kills + 1, "restart_backoff_s": 0.1}
    with serving(model, **restarts, **plan.options) as server:
        return asyncio.run(StressTest(server, cases, plan).run())


def where() -> dict[str, str]:
    """Return date, device and command."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "date": datetime.now().astimezone().date().isoformat(),
        "device": f"{os.cpu_count()}-core {cpu[1] if cpu else 'CPU'}",
        "command": shlex.join(["python", *sys.argv]),
    }


def main() -> int:
    plan, limits = Plan(), Limits()
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=plan.num_requests, help="of the crowd")
    parser.add_argument("--clients", type=int, default=plan.num_clients, help="of the crowd")
    parser.add_argument("--half-openers", type=int, default=plan.num_half_openers)
    parser.add_argument(
        "--kills", type=int, default=plan.num_kills, help="number of kills of the engine process"
    )
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--bomb-pause-s", type=float, default=plan.bomb_pause_s)
    parser.add_argument(
        "--bomb-s", type=float, default=limits.bomb_s, help="time limit of an answer to a bomb"
    )
    parser.add_argument("--half-open-s", type=float, default=limits.half_open_s)
    parser.add_argument("--max-growth-mib", type=float, default=limits.growth_mib)
    parser.add_argument("--max-peak-mib", type=float, default=limits.peak_mib)
    parser.add_argument("--serve", type=json.loads, default={}, help="options of the server, JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    limits = Limits(
        bomb_s=args.bomb_s,
        half_open_s=args.half_open_s,
        growth_mib=args.max_growth_mib,
        peak_mib=args.max_peak_mib,
    )
    plan = Plan(
        num_requests=args.requests,
        num_clients=args.clients,
        num_half_openers=args.half_openers,
        num_kills=args.kills,
        seed=args.seed,
        bomb_pause_s=args.bomb_pause_s,
        limits=limits,
        options=args.serve,
    )
    result = run_stress_test(args.model, plan)
    versions = {"python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in VERSIONS}
    report = where() | {"versions": versions, "seed": plan.seed, **result.report()}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    del report["samples"]
    print(json.dumps(report, indent=1))
    return 0 if result.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
