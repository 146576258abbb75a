"""A tiny engine to be measured, and documents as ``bench`` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.checkpoints import LLAMA, write_config
from sametoken.bench.workload import RequestSource, Workload
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine


def tiny_engine(directory: Path, **ngram):
    """An engine of random weights with prompt lookup, and the size of its vocabulary."""
    config = EngineConfig.from_options(
        model=str(write_config(directory)),
        load_format="dummy",
        device="cpu",
        max_num_seqs=4,
        speculative_config={"method": "ngram", **ngram},
    )
    return build_engine(config), LLAMA["vocab_size"]


def tiny_requests(vocab_size: int, count: int, output_len: int):
    return RequestSource(Workload(input_len=8, output_len=output_len), vocab_size).take(count)


def document(method: str | None = "ngram", k: int = 2, speed: float = 1.0, **changes) -> dict:
    """A measurement at 1 and at 4 requests at once, every time divided by ``speed``."""
    spec = {"method": method, "num_speculative_tokens": k, "model": None} if method else None
    rates = [0.75, 0.5, 0.25, 0.125][:k] if method else []
    return {
        "benchmark": "latency, 3 batches",
        "synthetic": [],
        "workload": {"input_len": 8, "output_len": 6, "temperature": 0.0, "prompts": 0},
        "settings": {
            "asked": {"model": "/models/target", "speculative_config": spec},
            "resolved": {"dtype": "float32"},
        },
        "environment": {"device": "a chip", "sametoken": "0.1.0", "date": "2026-01-01"},
        "results": [_result(count, speed, rates) for count in (1, 4)],
    } | changes


def _result(concurrency: int, speed: float, rates: list[float]) -> dict[str, Any]:
    tokens = 100.0 * concurrency**0.5 * speed
    return {
        "concurrency": concurrency,
        "num_tokens": 36,
        "tokens_per_second": tokens,
        "ttft_median": 12.34567 / speed,
        "tpot_mean": 8.7654321 / speed,
        "tpot_median": 8.5 * concurrency**0.5 / speed,
        "decode_tokens_per_second": None,
        "acceptance_length": 1 + sum(rates) if rates else None,
        "acceptance_per_position": rates,
        "runs": [
            {"tokens_per_second": tokens * share, "acceptance_length": None}
            for share in (0.99, 1.0, 1.01)
        ],
        "timeline": [_times(i, concurrency) for i in range(4)],
        "traces": [_trace(rates)],
    }


def _times(index: int, concurrency: int) -> dict[str, Any]:
    begin = 0.1 * (index // concurrency)
    times = {"arrival": begin, "first": begin + 0.02, "last": begin + 0.09}
    return {"run": 0, "prompt_len": 8, "output_len": 6, **times}


def _trace(rates: list[float]) -> dict[str, Any]:
    k = len(rates)
    windows = [
        {"first": 0, "num_drafts": 0, "num_accepted": 0},
        {"first": 1, "num_drafts": k, "num_accepted": min(k, 2)},
        {"first": min(k, 2) + 2, "num_drafts": k, "num_accepted": 0},
    ]
    texts = ["</script>", " <b>", "one", "\n", " two"][: min(k, 2) + 3]
    return {"request": "bench-0", "token_ids": [*range(len(texts))], "texts": texts} | {
        "windows": windows
    }
