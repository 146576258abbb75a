"""Does a served engine stay right and small? Thousands of requests, many of them cut short.

    python benchmarks/soak.py MODEL [--requests 10000] [--concurrency 64] [--json PATH]

The same few prompts, greedy and sampled, are answered offline and plainly first. Then they
are served with n-gram drafts, at random times and in random company; some requests are aborted,
some readers leave, some are cancelled, some never read. Every completed output must equal the
offline answer, every output that was cut short must be its beginning, a sample is audited, and
memory must stay flat. Prints a summary; exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from sametoken import LLM, SamplingParams
from sametoken.config import EngineConfig
from sametoken.engine.async_llm import AsyncLLM
from sametoken.engine.serving_limits import ServingLimits

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
FATES = ("finish", "abort", "leave", "cancel", "drop")
WEIGHTS = (70, 10, 10, 5, 5)
NUM_CASES = 48
#: Memory is looked at from here on, as a share of all requests.
WARM = 0.3

Case = tuple[dict[str, Any], SamplingParams]


@dataclass
class Soaked:
    """What came of a soak.

    Attributes:
        seconds: of serving.
        fates: requests by what became of them.
        wrong: completed outputs that differ from the offline answer, by request.
        no_beginning: outputs cut short that are not the beginning of it, by request.
        rss_mib: memory of both processes, at equal distances from the first to the last request.
        growth_mib: from the warm state to the largest later value.
        num_left: requests that the engine still held at the end.
        audited, mismatched: shadow audits.
    """

    seconds: float = 0.0
    fates: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    no_beginning: list[str] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    growth_mib: float = 0.0
    num_left: int = 0
    audited: int = 0
    mismatched: int = 0

    @property
    def is_right(self) -> bool:
        return not (self.wrong or self.no_beginning or self.num_left or self.mismatched)


def make_cases(vocab_size: int, max_tokens: int, seed: int = 0) -> list[Case]:
    """Prompts that repeat themselves, so that drafts are accepted, with their parameters."""
    chance = random.Random(seed)
    cases = []
    for i in range(NUM_CASES):
        phrase = [chance.randrange(vocab_size) for _ in range(chance.randint(2, 9))]
        params = SamplingParams(
            temperature=0.0 if i % 2 else 0.8,
            top_p=0.9 if i % 6 == 0 else 1.0,
            seed=i,
            max_tokens=chance.randint(1, max_tokens),
            ignore_eos=True,
            detokenize=False,
            num_speculative_tokens=chance.choice((None, None, 0, 2)),
        )
        cases.append(({"prompt_token_ids": phrase * chance.randint(1, 4)}, params))
    return cases


def answers(config: EngineConfig, cases: list[Case]) -> list[tuple[int, ...]]:
    """What a plain engine for programs says."""
    options = {name: getattr(config, name) for name in EngineConfig.__slots__}
    llm = LLM(**{**options, "speculative_config": None})
    plain = [replace(params, num_speculative_tokens=None) for _, params in cases]
    outputs = llm.generate([prompt for prompt, _ in cases], plain)
    return [output.outputs[0].token_ids for output in outputs]


class Soak:
    """Sends requests of known answers and lets fate take its course."""

    def __init__(self, llm: AsyncLLM, cases: list[Case], expected: list, seed: int) -> None:
        self.llm = llm
        self.soaked = Soaked()
        self._cases = cases
        self._expected = expected
        self._chance = random.Random(seed)

    async def run(self, num_requests: int, concurrency: int) -> Soaked:
        started = time.perf_counter()
        numbers = iter(range(num_requests))
        every = max(1, num_requests // 20)

        async def work() -> None:
            for number in numbers:
                if number % every == 0:
                    self.soaked.rss_mib.append(_rss_mib())
                await self._serve_one(number)

        await asyncio.gather(*(work() for _ in range(concurrency)))
        await self._come_to_rest()
        self.soaked.rss_mib.append(_rss_mib())
        self.soaked.seconds = time.perf_counter() - started
        warm = self.soaked.rss_mib[int(WARM * len(self.soaked.rss_mib)) :]
        self.soaked.growth_mib = max(warm) - warm[0]
        return self.soaked

    async def _serve_one(self, number: int) -> None:
        index = self._chance.randrange(len(self._cases))
        fate = self._chance.choices(FATES, WEIGHTS)[0]
        patience = self._chance.randint(0, 6)
        prompt, params = self._cases[index]
        name = f"{number}"
        stream = self.llm.generate(prompt, params, name)
        if fate == "drop":
            del stream
            await asyncio.sleep(0)
            self.soaked.fates["dropped"] += 1
            return
        reader = asyncio.create_task(self._read(stream, name, fate, patience))
        if fate == "cancel":
            await asyncio.sleep(self._chance.random() * 0.02)
            reader.cancel()
        await asyncio.wait((reader,))
        if reader.cancelled():
            self.soaked.fates["cancelled"] += 1
            return
        self._judge(name, reader.result(), self._expected[index])

    async def _read(self, stream: Any, name: str, fate: str, patience: int) -> Any:
        """The newest output that the reader stays for."""
        newest = None
        async for output in stream:
            newest = output
            patience -= 1
            if patience <= 0 and fate == "abort":
                await self.llm.abort(name)
            if patience <= 0 and fate == "leave":
                await stream.aclose()
        return newest

    def _judge(self, name: str, output: Any, expected: tuple[int, ...]) -> None:
        completion = output.outputs[0]
        reason = completion.finish_reason if output.finished else "left"
        self.soaked.fates[reason] += 1
        if reason in ("length", "stop") and completion.token_ids != expected:
            self.soaked.wrong.append(name)
        if completion.token_ids != expected[: len(completion.token_ids)]:
            self.soaked.no_beginning.append(name)

    async def _come_to_rest(self) -> None:
        """Wait for the engine to forget everybody, and for the audits."""
        gc.collect()
        for _ in range(3000):
            stats = self.llm.stats()
            load = stats.load
            self.soaked.num_left = load.num_running + load.num_waiting + load.num_swapped
            if not self.soaked.num_left and not stats.audit.num_pending:
                break
            await asyncio.sleep(0.01)
        self.soaked.audited = stats.audit.num_audited
        self.soaked.mismatched = stats.audit.num_mismatched


def _rss_mib() -> float:
    this = psutil.Process()
    processes = (this, *this.children(recursive=True))
    return sum(process.memory_info().rss for process in processes) / 2**20


def soak(
    config: EngineConfig, num_requests: int, concurrency: int, max_tokens: int, seed: int = 0
) -> Soaked:
    """Serve so many requests, at most ``concurrency`` at once, and hold them against the law."""

    async def serve() -> Soaked:
        llm = await AsyncLLM.start(config, ServingLimits(shadow_audit_rate=0.02))
        try:
            cases = make_cases(llm.resolved.vocab_size, max_tokens, seed)
            expected = await asyncio.to_thread(answers, config, cases)
            return await Soak(llm, cases, expected, seed).run(num_requests, concurrency)
        finally:
            await llm.shutdown()

    return asyncio.run(serve())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--max-model-len", type=int, default=64)
    parser.add_argument("--max-growth-mib", type=float, default=24.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    config = EngineConfig.from_options(
        model=asked.model,
        skip_tokenizer_init=True,
        max_model_len=asked.max_model_len,
        max_num_seqs=32,
        speculative_config=NGRAM,
    )
    soaked = soak(config, asked.requests, asked.concurrency, asked.max_tokens)
    text = json.dumps(vars(soaked), indent=2)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n")
    return 0 if soaked.is_right and soaked.growth_mib <= asked.max_growth_mib else 1


if __name__ == "__main__":
    sys.exit(main())
