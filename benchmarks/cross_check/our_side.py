"""Our side of the cross-check: greedy answers to the prompts, with and without the head.

    python benchmarks/cross_check/our_side.py MODEL PROMPTS.jsonl OUTDIR [--head smollm2-eagle3]

Writes ours_plain.json and ours_eagle3.json. Settings are those of vLLM's side: bf16, no prefix
cache, the same maximum of requests and rows.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from passes import (
    NUM_CANDIDATES,
    Prompt,
    Side,
    alone,
    engine_options,
    greedy,
    ranked,
    read_prompts,
    run_passes,
    write_side,
)

from sametoken import LLM, SamplingParams
from sametoken.types.outputs import CompletionOutput, SpeculationMetrics


def engine(args: argparse.Namespace, head: str | None) -> LLM:
    started = time.perf_counter()
    llm = LLM(args.model, device=args.device, dtype=args.dtype, **engine_options(head))
    print(
        f"{'eagle3' if head else 'plain'} up in {time.perf_counter() - started:.0f} s", flush=True
    )
    return llm


def steps_of(output: CompletionOutput) -> list[list[int]]:
    """Split an answer into the tokens of each step; the last step may be truncated."""
    steps, first = [], 0
    for _, num_accepted in output.windows:
        steps.append(list(output.token_ids[first : first + num_accepted + 1]))
        first += num_accepted + 1
    return [step for step in steps if step]


def answer(llm: LLM, max_tokens: int, batches: list[list[Prompt]]):
    """Return tokens [request][step] and the speculation counters of these requests."""
    steps, counters = [], SpeculationMetrics()
    for batch in batches:
        inputs = [{"prompt_token_ids": prompt.prompt_token_ids} for prompt in batch]
        params = [SamplingParams(**greedy(prompt, max_tokens)) for prompt in batch]
        for output in llm.generate(inputs, params):
            steps.append(steps_of(output.outputs[0]))
            counters += output.metrics.speculation
    offered = counters.offered_per_position
    return steps, asdict(counters) | {"num_drafts": offered[0] if offered else 0}


def probe(llm: LLM, prompts: list[Prompt], max_tokens: int):
    """Return the answers and the most likely tokens of each position."""
    inputs = [{"prompt_token_ids": prompt.prompt_token_ids} for prompt in prompts]
    params = [SamplingParams(**greedy(prompt, max_tokens, NUM_CANDIDATES)) for prompt in prompts]
    outputs = [one.outputs[0] for one in llm.generate(inputs, params)]
    candidates = [[ranked(position) for position in output.logprobs] for output in outputs]
    return [list(output.token_ids) for output in outputs], candidates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--head", default="smollm2-eagle3")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, help="fewer than all")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--gate", type=Path, help="directory in which parties wait for each other")
    parser.add_argument("--parties", type=int, default=1)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts)[: args.num_prompts]
    engines = {"plain": engine(args, None), "eagle3": engine(args, args.head)}
    for llm in engines.values():
        answer(llm, min(24, args.max_tokens), [prompts, prompts[:1]])
    print("warm", flush=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    settings = {"device": gpu, "torch": torch.__version__, "max_tokens": args.max_tokens}
    sides = {}
    with alone(args.gate, "ours", args.parties):
        for name, llm in engines.items():
            passes = run_passes(prompts, partial(answer, llm, args.max_tokens))
            sides[name] = Side("sametoken", passes, [], [], settings)
            write_side(args.out / f"ours_{name}.json", sides[name])
            for one in passes.values():
                num_tokens = sum(map(len, one.tokens))
                print(f"ours_{name}, {one.name}: {num_tokens} tokens, {one.seconds} s", flush=True)
    probed, candidates = probe(engines["plain"], prompts, args.max_tokens)
    probed_side = replace(sides["plain"], probed=probed, candidates=candidates)
    write_side(args.out / "ours_plain.json", probed_side)


if __name__ == "__main__":
    main()
