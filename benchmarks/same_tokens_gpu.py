"""Does speculation change a token? Real prompts on a GPU, with and without, at any concurrency.

    python benchmarks/same_tokens_gpu.py MODEL PROMPTS.jsonl [--max-tokens 192] [--json PATH]

Each line of PROMPTS is a list of token ids. Every prompt is answered greedily and at
temperature 0.8 with a seed of its own: plainly one at a time (the first 40), plainly at
concurrency 64, and with n-gram drafts at 64, the requests in another order. Prints how many
requests differ; exits with 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch

from sametoken.config import EngineConfig
from sametoken.core.request import EngineRequest
from sametoken.core.sampling_params import SamplingParams
from sametoken.engine.build import build_engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
ALONE = 40


def answer(core, prompts, temperature: float, max_tokens: int, order: list[int]):
    """Token ids by prompt, tokens/s, and drafts offered and accepted."""
    tokens = {i: [] for i in order}
    offered = accepted = 0
    for i in order:
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens)
        prompt = tuple(prompts[i])
        core.add_request(EngineRequest(str(i), prompt, params, len(prompt) + max_tokens))
    started = time.perf_counter()
    while core.has_unfinished:
        for update in core.step():
            offered += update.num_drafts
            accepted += update.num_accepted
            out = tokens[int(update.request_id)]
            out.extend(update.token_ids)
            if len(out) >= max_tokens:
                del out[max_tokens:]
                core.release(update.request_id)
    seconds = time.perf_counter() - started
    return tokens, len(order) * max_tokens / seconds, (offered, accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    prompts = [json.loads(line) for line in asked.prompts.read_text().splitlines()]
    everyone = list(range(len(prompts)))
    shuffled = random.Random(0).sample(everyone, len(everyone))
    cases = (
        ("plain, 1 at a time", None, 1, everyone[:ALONE]),
        ("plain, 64 at once", None, 64, everyone),
        ("n-gram, 64 at once", NGRAM, 64, shuffled),
        ("n-gram, 1 at a time", NGRAM, 1, everyone[:ALONE]),
    )
    results, rows = {}, []
    for name, speculation, concurrency, order in cases:
        core = build_engine(
            EngineConfig.from_options(
                model=asked.model,
                max_num_seqs=concurrency,
                max_model_len=2048,
                kv_cache_memory_bytes=4 * 2**30,
                speculative_config=speculation,
            )
        )
        for temperature in (0.0, 0.8):
            found = answer(core, prompts, temperature, asked.max_tokens, order)
            results[name, temperature] = found[0]
            offered, accepted = found[2]
            rows.append([name, temperature, len(order), found[1], offered, accepted])
            print(
                f"{name}, T={temperature}: {found[1]:.0f} tokens/s, {accepted} of {offered} drafts"
            )
        del core
        torch.cuda.empty_cache()
    total = 0
    for name, *_ in cases:
        for temperature in (0.0, 0.8):
            truth, mine = results["plain, 64 at once", temperature], results[name, temperature]
            differ = sum(mine[i] != truth[i] for i in mine)
            total += differ
            print(f"{name}, T={temperature}: {differ} of {len(mine)} requests differ")
            rows.append([name, temperature, "differ", differ, len(mine)])
    if asked.json:
        where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        asked.json.write_text(json.dumps({"device": where, "argv": sys.argv, "rows": rows}))
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
