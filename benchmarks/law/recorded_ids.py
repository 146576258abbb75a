"""Token ids of 300 requests of every kind, recorded before a change of the code and compared after.

    python benchmarks/law/recorded_ids.py FILE            compare; exit status 1 if any differ
    python benchmarks/law/recorded_ids.py FILE --record   write FILE

Thirty requests, greedy and sampled, penalised, biased, masked, stopped, grammar-bound and with
log-probabilities, go to each of ten engines on the CPU: SmolLM2 and the hybrid of the repository,
plain and with every kind of drafter, one with so few KV blocks that requests are swapped out. Ids
depend on machine and dtype: compare on the machine that recorded them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from sametoken import LLM, SamplingParams
from sametoken.bench.datasets import load_dataset
from sametoken.types.structured_outputs import StructuredOutputs

HYBRID = str(Path(__file__).parents[2] / "models" / "hybrid-28m")
MAX_TOKENS = 24


def ngram(k: int) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 4}


EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}
ENGINES: dict[str, dict[str, Any]] = {
    "smollm2": {},
    "smollm2 ngram": {"speculative_config": ngram(8)},
    "smollm2 suffix": {
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 6},
    },
    "smollm2 eagle3": {"speculative_config": EAGLE3},
    "smollm2 cascade": {"speculative_config": {**EAGLE3, "cascade": "ngram"}},
    "smollm2 draft model": {
        "speculative_config": {
            "method": "draft_model",
            "model": "smollm2",
            "num_speculative_tokens": 2,
        },
    },
    "smollm2 swapped": {
        "speculative_config": ngram(4),
        "num_kv_blocks": 60,
        "max_num_seqs": 16,
        "max_model_len": 640,
    },
    "hybrid": {"model": HYBRID},
    "hybrid ngram": {"model": HYBRID, "speculative_config": ngram(8)},
    "hybrid mtp": {
        "model": HYBRID,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
    },
}


def kinds() -> list[dict[str, Any]]:
    """Return sampling parameters of ten kinds."""
    digits = StructuredOutputs(regex="[0-9]{1,8}( apples| pears)")
    person = StructuredOutputs(json_schema='{"type":"object","properties":{"a":{"type":"string"}}}')
    return [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.8, "logit_bias": {11: 2.0}},
        {"temperature": 0.9, "seed": 4, "allowed_token_ids": tuple(range(20, 600))},
        {"temperature": 0.0, "bad_words": ("the", "is"), "min_tokens": 4},
        {"temperature": 0.6, "seed": 5, "logprobs": 3, "prompt_logprobs": 1, "n": 2},
        {"temperature": 0.0, "structured_outputs": digits, "stop": ("apples",)},
        {"temperature": 0.8, "seed": 6, "structured_outputs": person},
    ]


def record(options: dict[str, Any]) -> list[list[list[int]]]:
    """Return ids [completion][token] of thirty requests."""
    llm = LLM(**{"model": "smollm2", "device": "cpu", "max_model_len": 1024, **options})
    names = ("gsm8k", "humaneval", "mt-bench")
    items = [item for name in names for item in islice(load_dataset(name), 10)]
    params = [SamplingParams(max_tokens=MAX_TOKENS, **kind) for _ in names for kind in kinds()]
    outputs = llm.chat([item.messages for item in items], params)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    found = {}
    for name, options in ENGINES.items():
        found[name] = record(options)
        digest = hashlib.sha256(json.dumps(found[name]).encode()).hexdigest()[:12]
        print(f"{name}: {len(found[name])} requests, ids {digest}", flush=True)
    if arguments.record:
        kept = {"machine": platform.processor() or platform.machine(), "ids": found}
        arguments.file.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
        return 0
    known = json.loads(arguments.file.read_text())["ids"]
    differ = [
        f"{name}, request {index}"
        for name, requests in known.items()
        for index, ids in enumerate(requests)
        if found[name][index] != ids
    ]
    print("\n".join(differ) or "every token id is the recorded one")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
