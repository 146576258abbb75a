"""The cost of sampling options for a batch: tokens/s of 64 requests, some of which use one.

    python benchmarks/steps/asked_gpu.py MODEL [--json PATH] [--speculative-config JSON]

MODEL is a directory with a config.json; weights are random, so only times are meaningful. 64
requests of 512 tokens in and 128 out at temperature 0.8 arrive at once; none, a quarter, or all of
them use each of: log-probabilities, a logit bias, a repetition penalty, all penalties, allowed
ids, bad words, min tokens, top-p. Prints tokens/s, also relative to the batch without options,
which is measured before and after: the difference of the two is noise.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams

REQUESTS, INPUT, OUTPUT = 64, 512, 128
BAD_WORDS = ((5, 6), (7, 8, 9), (11,))
OPTIONS: dict[str, dict[str, Any]] = {
    "logprobs=1": {"logprobs": 1},
    "logit_bias": {"logit_bias": {1001: 2.0, 1002: -3.0}},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "three penalties": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
    },
    "allowed_token_ids": {"allowed_token_ids": tuple(range(500, 20_500))},
    "bad_words": {"bad_words": ("as ids",)},
    "min_tokens": {"min_tokens": OUTPUT},
    "top_p": {"top_p": 0.95},
}


def batch(options: dict[str, Any], share: int, rng: random.Random) -> list[EngineRequest]:
    """Make the requests; every ``share``-th has the options, none if it is 0."""
    requests = []
    for index in range(REQUESTS):
        more = options if share and index % share == 0 else {}
        params = SamplingParams(
            temperature=0.8, seed=index, max_tokens=OUTPUT, ignore_eos=True, **more
        )
        requests.append(
            EngineRequest(
                request_id=f"r{index}",
                prompt_token_ids=tuple(rng.randrange(1000, 50_000) for _ in range(INPUT)),
                params=params,
                max_total_tokens=INPUT + OUTPUT,
                stop_token_ids=(2,) if params.min_tokens else (),
                bad_words_token_ids=BAD_WORDS if params.bad_words else (),
            )
        )
    return requests


def tokens_per_second(core: EngineCore, requests: list[EngineRequest]) -> float:
    for request in requests:
        core.add_request(request)
    left = {request.request_id: OUTPUT for request in requests}
    began = time.perf_counter()
    while left:
        for update in core.step():
            assert not update.failed
            if update.request_id in left:
                left[update.request_id] -= len(update.token_ids)
                if left[update.request_id] <= 0:
                    del left[update.request_id]
                    core.release(update.request_id)
    seconds = time.perf_counter() - began
    while core.has_unfinished:
        core.step()
    return REQUESTS * OUTPUT / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--speculative-config")
    arguments = parser.parse_args()
    engine_options: dict[str, Any] = {}
    if arguments.speculative_config:
        engine_options["speculative_config"] = arguments.speculative_config
    core = build_engine(
        EngineConfig.from_options(
            model=arguments.model,
            load_format="dummy",
            max_model_len=2048,
            enable_prefix_caching=False,
            **engine_options,
        ),
        print,
    )
    rng, rows = random.Random(1), []

    def measure(name: str, options: dict[str, Any], share: int) -> float:
        rate = tokens_per_second(core, batch(options, share, rng))
        rows.append({"asked": name, "of_64": REQUESTS // share if share else 0, "rate": rate})
        return rate

    measure("warm up", {}, 0)
    base = measure("nothing", {}, 0)
    for name, options in OPTIONS.items():
        for share in (4, 1):
            rate = measure(name, options, share)
            print(f"{name}, {REQUESTS // share} of 64: {rate:.0f}, {rate / base:.3f}", flush=True)
    after = measure("nothing, after", {}, 0)
    print(f"nothing: {base:.0f} before, {after:.0f} after ({after / base:.3f})")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
