"""Does a server stay right and small? Thousands of requests over HTTP, many of them cut short.

    python benchmarks/soak.py MODEL [--requests 10000] [--concurrency 64] [--json PATH]

Prompts and conversations, greedy and sampled, are answered by an engine in this process first,
plainly. Then ``sametoken serve`` runs in a process of its own, with n-gram drafts and too few KV
blocks for all, and is asked the same at random, whole and in streams. Some readers are slow, some
leave in mid-stream or before the first token, and some requests are malformed. Every completed
answer must equal the offline one, every answer cut short must be its beginning, what is malformed
must be refused, replays (the shadow audit) must agree, and memory must stay flat. At the end
nothing may be left, and SIGTERM must let the last streams finish. Prints a summary; exits with 1
if anything is wrong. MODEL needs a tokenizer and a chat template.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from soak_requests import MALFORMED, NUM_LONG, Answer, Case, make_cases

from sametoken import LLM

ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "prefill_chunk_size": 16,
    "block_size": 8,
    # Too few for 16 long requests: some are preempted.
    "num_kv_blocks": 60,
    "steps_in_flight": 2,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
AUDIT_RATE = 0.02
#: What clients do, and how often.
FATES = {"whole": 30, "stream": 30, "slow": 10, "leave": 12, "vanish": 12, "malformed": 6}
#: Memory is looked at from here on, as a share of all requests.
WARM = 0.3
NUM_SAMPLES = 20
#: For what comes or never does, however busy the machine is.
PATIENCE_S = 600.0
#: Gauges that must be 0 once nobody asks any more.
LEFT = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "shadow_audits_pending",
)
#: Counters that must be 0 at the end.
HARM = ("engine_restarts_total", "requests_failed_total", "shadow_audit_differences_total")
ACCEPTED = "spec_decode_num_accepted_tokens_total"
COUNTED = (*HARM, "shadow_audits_total", ACCEPTED)


class Failed(Exception):
    """The server gave no answer where it had to."""


@dataclass
class Soaked:
    """What came of a soak.

    Attributes:
        seconds: of serving.
        fates: requests by what became of them.
        wrong: completed answers that differ from the offline one, by request.
        no_beginning: answers cut short that are not the beginning of it, by request.
        failed: requests without an answer, and malformed ones that were not refused; with why.
        samples: memory in MiB and load, at equal distances from the first to the last request.
        growth_mib: of each process, from the warm state to the largest later value.
        left: gauges at the end, which should be 0.
        counted: counters at the end.
        num_met: streams that SIGTERM met in flight.
        exit_code: of the server after SIGTERM; None: it did not end.
        num_tracebacks: in the server's log.
    """

    seconds: float = 0.0
    fates: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    no_beginning: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    growth_mib: dict[str, float] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    num_met: int = 0
    exit_code: int | None = None
    num_tracebacks: int = 0

    @property
    def is_right(self) -> bool:
        """Whether nothing went wrong, and drafts were accepted meanwhile."""
        faults = (self.wrong, self.no_beginning, self.failed, self.num_tracebacks)
        harm = [self.counted[name] for name in HARM]
        is_clean = not (any(faults) or any(harm) or any(self.left.values()))
        return is_clean and self.exit_code == 0 and self.counted[ACCEPTED] > 0

    def judge(self, name: str, case: Case, answer: Answer) -> None:
        """Hold an answer, or the beginning of one, against the offline one."""
        is_beginning = case.token_ids[: len(answer.token_ids)] == tuple(answer.token_ids)
        if not is_beginning or not case.text.startswith(answer.text):
            self.no_beginning.append(name)
        if answer.is_whole and (*answer.token_ids, answer.text) != (*case.token_ids, case.text):
            self.wrong.append(name)

    def weigh(self) -> None:
        """Compare memory with that of the warm state."""
        warm = self.samples[int(WARM * len(self.samples)) :]
        for name in ("server_mib", "engine_mib"):
            values = [sample[name] for sample in warm]
            self.growth_mib[name] = max(values) - values[0]


class Server:
    """``sametoken serve`` in a process of its own.

    Args:
        model: as on its command line.
        log: a file for what it prints.
    """

    def __init__(self, model: str, log: Path) -> None:
        options = {**ENGINE, "port": 0, "shadow_audit_rate": AUDIT_RATE}
        words = [word for name, value in options.items() for word in (_flag(name), str(value))]
        words += [_flag("speculative_config"), json.dumps(NGRAM)]
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sametoken", "serve", model, *words],
                stdout=file,
                stderr=file,
            )

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def wait_for_url(self) -> str:
        """Where it listens, once it does."""
        deadline = time.monotonic() + PATIENCE_S
        while "Application startup complete" not in self.log:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server does not start:\n{self.log}")
            time.sleep(0.05)
        return re.search(r"at (http://\S+)", self.log)[1]

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of the serving process and of its engine process."""
        serving = psutil.Process(self.process.pid)
        engines = sum(child.memory_info().rss for child in serving.children())
        return {
            "server_mib": serving.memory_info().rss / 2**20,
            "engine_mib": engines / 2**20,
        }


@contextlib.contextmanager
def serving(model: str) -> Iterator[Server]:
    """A server, killed at the end if it has not ended."""
    with tempfile.TemporaryDirectory() as directory:
        server = Server(model, Path(directory) / "server.log")
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()


class Soak:
    """Sends requests of known answers and lets fate take its course.

    Args:
        server: has its memory looked at.
        client: of the server.
        cases: what to ask.
        seed: of the fates.
    """

    def __init__(
        self, server: Server, client: httpx.AsyncClient, cases: list[Case], seed: int
    ) -> None:
        self.soaked = Soaked()
        self._server = server
        self._client = client
        self._cases, self._long_cases = cases[:-NUM_LONG], cases[-NUM_LONG:]
        self._chance = random.Random(seed)

    async def run(self, num_requests: int, concurrency: int) -> Soaked:
        """Send so many requests, at most ``concurrency`` at once; then end the server."""
        began = time.perf_counter()
        numbers = iter(range(num_requests))
        every = max(1, num_requests // NUM_SAMPLES)

        async def work() -> None:
            for number in numbers:
                if number % every == 0:
                    await self._sample(number)
                await self._visit(str(number))

        await asyncio.gather(*(work() for _ in range(concurrency)))
        self.soaked.seconds = time.perf_counter() - began
        await self._come_to_rest()
        await self._sample(num_requests)
        self.soaked.weigh()
        await self._end()
        return self.soaked

    async def _visit(self, name: str) -> None:
        """One client, whatever it does."""
        fate = self._chance.choices(list(FATES), list(FATES.values()))[0]
        case, answer = self._chance.choice(self._cases), Answer()
        try:
            if fate == "malformed":
                became = await self._send_malformed()
            elif fate == "vanish":
                became = await self._vanish(case, answer)
            elif fate == "whole":
                became = await self._ask(case, answer)
            else:
                patience = self._chance.randint(1, 8) if fate == "leave" else None
                pause_s = 0.03 if fate == "slow" else 0.0
                became = await self._stream(case, answer, pause_s=pause_s, patience=patience)
        except (Failed, httpx.HTTPError) as error:
            self.soaked.failed.append(f"{name}, {fate}: {error!r}")
            return
        self.soaked.fates[became] += 1
        self.soaked.judge(name, case, answer)

    async def _ask(self, case: Case, answer: Answer) -> str:
        response = await self._client.post(case.path, json=case.body)
        if response.status_code != httpx.codes.OK:
            raise Failed(f"{response.status_code} {response.text}")
        answer.take(response.json())
        answer.is_whole = True
        return "whole"

    async def _stream(
        self, case: Case, answer: Answer, *, pause_s: float = 0.0, patience: int | None = None
    ) -> str:
        """Read events, with random pauses, to the end or until patience is at its end."""
        sent = self._client.stream("POST", case.path, json=case.body | {"stream": True})
        async with sent as response, contextlib.aclosing(response.aiter_lines()) as lines:
            if response.status_code != httpx.codes.OK:
                raise Failed(f"{response.status_code} {await response.aread()!r}")
            num_events = 0
            async for line in lines:
                if line == "data: [DONE]":
                    answer.is_whole = True
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Failed(line)
                    answer.take(event)
                    num_events += 1
                    if num_events == patience:
                        return "left in mid-stream"
                    await asyncio.sleep(2 * pause_s * self._chance.random())
        if not answer.is_whole:
            raise Failed("the stream ended before the answer")
        return "read slowly" if pause_s else "streamed"

    async def _vanish(self, case: Case, answer: Answer) -> str:
        """Leave after a while, whatever has come by then; often that is nothing."""
        read = self._chance.choice((self._ask, self._stream))
        reading = asyncio.create_task(read(case, answer))
        await asyncio.wait((reading,), timeout=0.05 * self._chance.random())
        reading.cancel()
        await asyncio.wait((reading,))
        if not reading.cancelled():
            return reading.result()
        return "left in mid-stream" if answer.token_ids else "left before the first token"

    async def _send_malformed(self) -> str:
        path, content = self._chance.choice(MALFORMED)
        headers = {"Content-Type": "application/json"}
        response = await self._client.post(path, content=content, headers=headers)
        if not response.is_client_error or not response.json()["error"]["message"]:
            raise Failed(f"{response.status_code} to {content[:80]!r}")
        return "refused"

    async def _end(self) -> None:
        """SIGTERM while streams are in flight: they finish, and the process ends by itself."""
        answers = [Answer() for _ in self._long_cases]
        reading = [
            asyncio.create_task(self._stream(case, answer, pause_s=0.005))
            for case, answer in zip(self._long_cases, answers, strict=True)
        ]
        while not all(answer.token_ids for answer in answers):
            if any(one.done() and one.exception() for one in reading):
                break
            await asyncio.sleep(0.001)
        self.soaked.num_met = sum(not one.done() for one in reading)
        self._server.process.send_signal(signal.SIGTERM)
        for index, one in enumerate(reading):
            try:
                self.soaked.fates[await one] += 1
            except (Failed, httpx.HTTPError) as error:
                self.soaked.failed.append(f"last {index}: {error!r}")
            self.soaked.judge(f"last {index}", self._long_cases[index], answers[index])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.soaked.exit_code = await asyncio.to_thread(self._server.process.wait, PATIENCE_S)
        self.soaked.num_tracebacks = self._server.log.count("Traceback")

    async def _sample(self, number: int) -> None:
        load = await self._metrics(LEFT)
        self.soaked.samples.append({"requests": number, **self._server.memory_mib(), **load})

    async def _come_to_rest(self) -> None:
        """Wait for the server to forget everybody, and for the audits."""
        deadline = time.monotonic() + PATIENCE_S
        self.soaked.left = await self._metrics(LEFT)
        while any(self.soaked.left.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            self.soaked.left = await self._metrics(LEFT)
        self.soaked.counted = await self._metrics(COUNTED)

    async def _metrics(self, names: tuple[str, ...]) -> dict[str, float]:
        """Values of the server's metrics."""
        text = (await self._client.get("/metrics")).text
        found = {
            sample.name.removeprefix("sametoken:"): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return {name: found[name] for name in names}


def soak(
    model: str, num_requests: int, concurrency: int, max_tokens: int = 24, seed: int = 0
) -> Soaked:
    """Serve so many requests, at most ``concurrency`` at once, and hold them against the law."""
    cases = make_cases(LLM(model, **ENGINE), max_tokens, seed)

    async def run(server: Server) -> Soaked:
        url = server.wait_for_url()
        limits = httpx.Limits(max_connections=concurrency + NUM_LONG)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
            return await Soak(server, client, cases, seed).run(num_requests, concurrency)

    with serving(model) as server:
        return asyncio.run(run(server))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def where() -> dict[str, str]:
    """When, on what, and by which command."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "date": datetime.now().astimezone().date().isoformat(),
        "device": f"{os.cpu_count()}-core {cpu[1] if cpu else 'CPU'}",
        "command": shlex.join(["python", *sys.argv]),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-growth-mib", type=float, default=24.0, help="of each process")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    soaked = soak(asked.model, asked.requests, asked.concurrency)
    text = json.dumps(where() | vars(soaked), indent=1)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n")
    is_small = max(soaked.growth_mib.values()) <= asked.max_growth_mib
    return 0 if soaked.is_right and is_small else 1


if __name__ == "__main__":
    sys.exit(main())
