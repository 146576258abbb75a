"""vLLM's side of the cross-check: greedy answers to the prompts, with and without our head.

    python benchmarks/cross_check/vllm_side.py CHECKPOINT PROMPTS.jsonl OUT.json [--head DIR]

Needs vLLM and nothing of this package. Every step's tokens are recorded, so that acceptance can be
counted from the output, independent of the engine's counters.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import count
from pathlib import Path

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

CAPTURE_SIZES = [1, 2, 4, 5, 8, 16, 24, 32, 40, 48, 64, 80, 120, 160, 200, 240, 280, 320]
COUNTERS = "vllm:spec_decode_"


class Engine:
    """vLLM's offline engine, driven step by step."""

    def __init__(self, checkpoint: str, head: str | None) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=checkpoint,
            dtype="bfloat16",
            gpu_memory_utilization=0.05,
            disable_log_stats=False,
            attention_backend="FLASH_ATTN",
            seed=0,
            cudagraph_capture_sizes=CAPTURE_SIZES,
            **engine_options(head),
        )
        self._names = map(str, count())

    def answer(self, prompts: list[Prompt], max_tokens: int) -> list[list[list[int]]]:
        """Answer all prompts at once; return tokens [request][step]."""
        from vllm import SamplingParams

        engine, steps = self.llm.llm_engine, {}
        for prompt in prompts:
            name, params = next(self._names), SamplingParams(**greedy(prompt, max_tokens))
            engine.add_request(name, {"prompt_token_ids": prompt.prompt_token_ids}, params)
            steps[name] = ([], [])
        while engine.has_unfinished_requests():
            for output in engine.step():
                before, own = steps[output.request_id]
                tokens = list(output.outputs[0].token_ids)
                if len(tokens) > len(before):
                    own.append(tokens[len(before) :])
                    before[:] = tokens
        return [own for _, own in steps.values()]

    def counters(self) -> dict:
        """Return the speculation counters since the start; numbers, or lists by position."""
        return {
            metric.name.removeprefix(COUNTERS): _value(metric)
            for metric in self.llm.get_metrics()
            if metric.name.startswith(COUNTERS)
        }

    def probe(self, prompts: list[Prompt], max_tokens: int):
        """Return the answers and the most likely tokens of each position."""
        from vllm import SamplingParams

        params = [SamplingParams(**greedy(one, max_tokens, NUM_CANDIDATES)) for one in prompts]
        inputs = [{"prompt_token_ids": prompt.prompt_token_ids} for prompt in prompts]
        outputs = [one.outputs[0] for one in self.llm.generate(inputs, params, use_tqdm=False)]
        tokens = [list(output.token_ids) for output in outputs]
        return tokens, [[ranked(position) for position in o.logprobs] for o in outputs]


def _value(metric) -> int | list[int]:
    return metric.values if hasattr(metric, "values") else metric.value


def since(before: dict, after: dict) -> dict:
    def less(name: str):
        now, then = after[name], before.get(name, 0)
        if isinstance(now, list):
            return [a - b for a, b in zip(now, then or [0] * len(now), strict=True)]
        return now - then

    return {name: less(name) for name in after}


def measure(engine: Engine, prompts: list[Prompt], max_tokens: int) -> Side:
    import vllm

    def run(batches: list[list[Prompt]]):
        before = engine.counters()
        steps = [one for batch in batches for one in engine.answer(batch, max_tokens)]
        return steps, since(before, engine.counters())

    passes = run_passes(prompts, run)
    config = engine.llm.llm_engine.vllm_config
    v2 = bool(getattr(config, "use_v2_model_runner", False))
    settings = {"max_tokens": max_tokens, "v2_model_runner": v2}
    return Side(f"vLLM {vllm.__version__}", passes, [], [], settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--head", help="an EAGLE-3 head's directory")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--gate", type=Path, help="directory in which parties wait for each other")
    parser.add_argument("--parties", type=int, default=1)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts)
    engine = Engine(args.checkpoint, args.head)
    print("up", flush=True)
    for batch in (prompts, prompts[:1]):
        engine.answer(batch, 24)
    print("warm", flush=True)
    with alone(args.gate, args.output.stem, args.parties):
        side = measure(engine, prompts, args.max_tokens)
    write_side(args.output, side)
    for name, one in side.passes.items():
        num_tokens = sum(map(len, one.tokens))
        print(f"{args.output.stem}, {name}: {num_tokens} tokens, {one.seconds} s, {one.counters}")
    if not args.head:
        # The times are already on disk: a failure here loses only the margins.
        probed, candidates = engine.probe(prompts, args.max_tokens)
        write_side(args.output, replace(side, probed=probed, candidates=candidates))


if __name__ == "__main__":
    main()
