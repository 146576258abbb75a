"""Does speculation change a token? Real prompts on a GPU, with and without drafts.

    python benchmarks/law/same_tokens_gpu.py MODEL PROMPTS.jsonl [--max-tokens 192] [--json PATH]

MODEL is a checkpoint or a GGUF file; each line of PROMPTS is a list of token ids. Every prompt is
answered greedily and at temperature 0.8 with a distinct seed: plain at concurrency 64, plain
again in another order (with blocks of the first run in the prefix cache), plain one at a time
(the first 40), and with n-gram drafts at concurrency 64 and one at a time. Prints the number of
requests that differ; exits with 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams

REFERENCE = "plain, together"
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Answers:
    """One pass over the prompts."""

    tokens: dict[int, list[int]]
    tokens_per_second: float
    num_offered: int
    num_accepted: int


@dataclass(frozen=True)
class Row:
    """A pass in the report; ``differ`` counts requests that differ from the reference."""

    name: str
    temperature: float
    requests: int
    tokens_per_second: float
    offered: int
    accepted: int
    differ: int


def answer(core: EngineCore, prompts, temperature: float, max_tokens: int, order) -> Answers:
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
    return Answers(tokens, len(order) * max_tokens / seconds, offered, accepted)


def engine(args: argparse.Namespace, prompts, concurrency: int, *, drafts: bool) -> EngineCore:
    ngram = {"method": "ngram", "num_speculative_tokens": args.k, "prompt_lookup_max": 4}
    return build_engine(
        EngineConfig.from_options(
            model=args.model,
            device=args.device,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_num_seqs=concurrency,
            max_model_len=max(map(len, prompts)) + args.max_tokens,
            kv_cache_memory_bytes=4 * 2**30,
            speculative_config=ngram if drafts else None,
        )
    )


def passes(args: argparse.Namespace, prompts):
    """Yield (name, temperature, answers), the reference first."""
    everyone = list(range(len(prompts)))
    shuffled = random.Random(0).sample(everyone, len(everyone))
    first = everyone[: args.alone]
    cases = (
        (args.concurrency, False, ((REFERENCE, everyone), ("plain, together again", shuffled))),
        (1, False, (("plain, one at a time", first),)),
        (args.concurrency, True, (("n-gram, together", shuffled),)),
        (1, True, (("n-gram, one at a time", first),)),
    )
    for concurrency, drafts, orders in cases:
        core = engine(args, prompts, concurrency, drafts=drafts)
        for name, order in orders:
            for temperature in TEMPERATURES:
                yield name, temperature, answer(core, prompts, temperature, args.max_tokens, order)
        del core
        torch.cuda.empty_cache()


def compare(args: argparse.Namespace, prompts) -> list[Row]:
    truth: dict[float, dict[int, list[int]]] = {}
    rows = []
    for name, temperature, found in passes(args, prompts):
        right = truth.setdefault(temperature, found.tokens)
        rows.append(
            Row(
                name,
                temperature,
                len(found.tokens),
                found.tokens_per_second,
                found.num_offered,
                found.num_accepted,
                sum(tokens != right[i] for i, tokens in found.tokens.items()),
            )
        )
        print(f"{name}, T={temperature}: {rows[-1].differ} differ", flush=True)
    return rows


def show(rows: list[Row]) -> None:
    print(f"\n{'':24}{'T':>5}{'tok/s':>9}{'accepted of drafts':>22}{'differ':>9}{'of':>5}")
    for row in rows:
        drafts = f"{row.accepted} of {row.offered}" if row.offered else "-"
        print(
            f"{row.name:24}{row.temperature:5}{row.tokens_per_second:9.0f}{drafts:>22}"
            f"{row.differ:9}{row.requests:5}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument(
        "--alone", type=int, default=40, help="number of prompts that run one at a time"
    )
    parser.add_argument("--num-prompts", type=int, help="fewer than all")
    parser.add_argument("--k", type=int, default=5, help="drafts per step")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lines = args.prompts.read_text().splitlines()[: args.num_prompts]
    started = time.perf_counter()
    rows = compare(args, [json.loads(line) for line in lines])
    show(rows)
    print(f"{time.perf_counter() - started:.0f} s in all")
    if args.json:
        chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        record = {"device": chip, "torch": torch.__version__, "argv": sys.argv[1:]}
        args.json.write_text(json.dumps(record | {"rows": [asdict(row) for row in rows]}) + "\n")
    sys.exit(int(any(row.differ for row in rows)))


if __name__ == "__main__":
    main()
