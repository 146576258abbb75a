"""Acceptance of an EAGLE-3 head or an MTP module on our data sets.

    python benchmarks/training/acceptance.py MODEL HEAD OUT.json [--k 4] [--limit 200] [--batch 64]
        [--token-map MAP.json]

Greedy answers to GSM8K's test questions, HumanEval and the first turns of MT-Bench. MODEL and
HEAD are paths or short names: ``smollm2`` and ``smollm2-eagle3`` ship with the package; the head
``mtp`` is MODEL's own module, as in ``hybrid-28m``. The acceptance length counts steps with
drafts; they have K, however many prompts run. OUT is written after every data set, so that an
interrupted run leaves results; only a complete run has the mean.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from sametoken import LLM, SamplingParams
from sametoken.bench.datasets import load_dataset
from sametoken.types.outputs import SpeculationMetrics

DATASETS = ("gsm8k", "humaneval", "mt-bench")
MTP = "mtp"


def figures(metrics: SpeculationMetrics, seconds: float) -> dict:
    steps = metrics.offered_per_position[0] if metrics.offered_per_position else 0
    return {
        "acceptance_length": 1 + metrics.num_accepted_tokens / max(steps, 1),
        "acceptance_length_of_all_steps": metrics.acceptance_length,
        "per_position": [count / max(steps, 1) for count in metrics.accepted_per_position],
        "steps": steps,
        "accepted": metrics.num_accepted_tokens,
        "drafted": metrics.num_draft_tokens,
        "seconds": seconds,
        "tokens_per_second": (metrics.num_steps + metrics.num_accepted_tokens) / seconds,
    }


def measure(llm: LLM, name: str, limit: int, max_tokens: int) -> dict:
    items = load_dataset(name, limit=limit)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    began = time.monotonic()
    outputs = llm.chat([item.messages for item in items], params)
    total = SpeculationMetrics()
    for output in outputs:
        total += output.metrics.speculation
    return figures(total, time.monotonic() - began) | {"requests": len(items)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("head")
    parser.add_argument("output", type=Path)
    parser.add_argument("--k", type=int, default=4, help="drafts per step")
    parser.add_argument("--limit", type=int, default=200, help="maximum prompts per data set")
    parser.add_argument("--max-tokens", type=int, default=512, help="maximum tokens per answer")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64, help="prompts that run at once")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--token-map", help="token map of the head, from `sametoken train token-map`"
    )
    args = parser.parse_args()
    own = {"method": "eagle3", "model": args.head} if args.head != MTP else {"method": MTP}
    if args.token_map:
        own["token_map"] = args.token_map
    llm = LLM(
        args.model,
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=args.batch,
        speculative_config=own | {"num_speculative_tokens": args.k, "draft_limits": "fixed"},
    )
    settings = {"k": args.k, "limit": args.limit, "max_tokens": args.max_tokens}
    found: dict[str, dict] = {}
    for name in DATASETS:
        found[name] = measure(llm, name, args.limit, args.max_tokens)
        result = {"settings": settings | {"temperature": 0.0}, **found}
        if len(found) == len(DATASETS):
            lengths = [one["acceptance_length"] for one in found.values()]
            result["mean"] = sum(lengths) / len(lengths)
            print(f"mean {result['mean']:.3f}")
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        length, requests = found[name]["acceptance_length"], found[name]["requests"]
        print(f"{name}: {length:.3f} tokens per step, {requests} requests", flush=True)


if __name__ == "__main__":
    main()
