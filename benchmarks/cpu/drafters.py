"""Drafters on the CPU beside plain decoding and llama.cpp: SmolLM2-135M, real prompts, greedy.

Every side loads the same GGUF file in a separate process. The sides answer each prompt in turn,
one request at a time:

    python benchmarks/cpu/drafters.py [--prompts 20] [--max-tokens 128] [--json PATH]
        [--llama-python PATH] [--llama-model GGUF] [--load-format gguf-packed]

``--llama-python`` is an interpreter with the package llama-cpp-python, which is compiled for this
processor when it is installed; without it that side is left out. ``--llama-model`` is another file
of the same model for it, as one in BF16. Exits with 1 if a drafter changed one of our tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafter_sides import LLAMA, DrafterSide
from drafters_report import Results, report
from rich.console import Console
from rich.progress import Progress
from sides import LOOKUP
from whole_requests import (
    MAX_TRIALS,
    WARM_UP_TOKENS,
    Worker,
    describe,
    measure,
    quiet_answer,
    start,
)

from sametoken.bench.datasets import load_dataset
from sametoken.bench.prompts import first_turn
from sametoken.config import DEFAULT_MODEL, SpeculativeConfig
from sametoken.models.names import HEAD_FILES, HEAD_NAME, resolve_drafter, resolve_model
from sametoken.text.tokenizer import load_tokenizer
from sametoken.types.outputs import SpeculationMetrics

sys.path.append(str(Path(__file__).parents[1] / "training"))
from acceptance import DATASETS, figures

WORKER = Path(__file__).with_name("drafter_sides.py")
LOOKUP_DRAFTS = 8
HEAD_DRAFTS = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question of a data set as token ids, chat template applied."""

    dataset: str
    token_ids: list[int]


@dataclass(slots=True)
class Measured:
    """A side's process, its facts, and one answer per prompt."""

    worker: Worker
    facts: dict[str, Any]
    answers: list[dict[str, Any]] = field(default_factory=list)


def sides(model: str, head: str, options: argparse.Namespace) -> list[DrafterSide]:
    """List the sides: plain decoding first, llama.cpp last if available."""
    eagle = {"method": "eagle3", "model": head}
    specs: dict[str, dict[str, Any] | None] = {"plain": None}
    specs[f"n-gram {LOOKUP_DRAFTS}"] = LOOKUP | {"num_speculative_tokens": LOOKUP_DRAFTS}
    for k in HEAD_DRAFTS:
        specs[f"EAGLE-3 {k}"] = eagle | {"num_speculative_tokens": k}
    specs[f"n-gram {LOOKUP_DRAFTS}, or EAGLE-3 {options.cascade_drafts}"] = eagle | {
        "num_speculative_tokens": LOOKUP_DRAFTS,
        "cascade": "ngram",
        "cascade_min_match": options.cascade_match,
        "cascade_model_tokens": options.cascade_drafts,
    }
    found = [
        DrafterSide(
            "sametoken",
            model,
            "auto",
            options.threads,
            load_format=options.load_format,
            label=label,
            spec=spec,
        )
        for label, spec in specs.items()
    ]
    if options.llama_python:
        file = options.llama_model or model
        found.append(DrafterSide(LLAMA, file, "auto", options.threads, label=LLAMA))
    return found


def read_prompts(model: str, limit: int) -> list[Prompt]:
    tokenizer = load_tokenizer(Path(model))
    templated = bool(tokenizer.chat_template)
    return [
        Prompt(dataset, list(first_turn(item, tokenizer, templated=templated)[1]))
        for dataset in DATASETS
        for item in load_dataset(dataset, limit=limit)
    ]


def run(options: argparse.Namespace, console: Console) -> Results:
    """Run all measurements; return the results as JSON values."""
    model = resolve_model(DEFAULT_MODEL, console.print)
    config = SpeculativeConfig("eagle3", HEAD_DRAFTS[0], options.head)
    spec, _ = resolve_drafter(config, model, console.print)
    head = str(spec.model if spec else "")
    prompts = read_prompts(str(model), options.prompts)
    environment = describe(options)
    # Their directories are specific to this machine.
    for path in filter(None, (options.llama_python, options.llama_model)):
        environment["command"] = environment["command"].replace(path, Path(path).name)
    with ExitStack() as stack:
        measured = []
        for side in sides(str(model), options.head, options):
            python = options.llama_python if side.engine == LLAMA else sys.executable
            worker = stack.enter_context(start(side, (python, str(WORKER))))
            # Sides load and warm up one at a time, before any measurement.
            measured.append(Measured(worker, worker.read()))
            worker.request(prompt=prompts[0].token_ids, max_tokens=WARM_UP_TOKENS)
        take_turns(measured, prompts, options, console)
    weights = (Path(head) / HEAD_FILES[-1]).read_bytes()
    return environment | {
        "load_after": os.getloadavg()[0],
        "prompts": {name: sum(p.dataset == name for p in prompts) for name in DATASETS},
        "head": {"name": options.head, "sha256": hashlib.sha256(weights).hexdigest()},
        "sides": [as_json(one, measured[0], prompts) for one in measured],
    }


def take_turns(
    measured: list[Measured], prompts: list[Prompt], options: argparse.Namespace, console: Console
) -> None:
    """Let every side answer a prompt before any side answers the next."""
    # No automatic refresh: its thread would disturb the measurement.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("requests", total=len(prompts) * len(measured))
        for prompt in prompts:
            for one in measured:
                answer = quiet_answer(
                    one.worker, prompt.token_ids, options.max_tokens, options.trials
                )
                one.answers.append(answer)
                progress.update(task, advance=1, refresh=True)


def as_json(one: Measured, plain: Measured, prompts: list[Prompt]) -> dict[str, Any]:
    """Return a side's figures by data set, with speed-ups over plain decoding."""
    found, base = by_dataset(one, prompts), by_dataset(plain, prompts)
    for name, figure in found.items():
        for rate in ("decode", "request"):
            key = f"{rate}_tokens_per_second"
            figure[f"{rate}_speed_up"] = figure[key] / base[name][key]
    pairs = zip(one.answers, plain.answers, strict=True)
    means = {
        f"mean_{rate}_speed_up": sum(f[f"{rate}_speed_up"] for f in found.values()) / len(found)
        for rate in ("decode", "request")
    }
    side: Any = one.worker.side
    return {
        "name": side.name,
        "engine": side.engine,
        "speculative": side.speculative,
        "facts": one.facts,
        "datasets": found,
        **means,
        "other_than_plain": [
            i for i, (a, b) in enumerate(pairs) if a["token_ids"] != b["token_ids"]
        ],
        "others_cores": [answer["others_cores"] for answer in one.answers],
        "peak_rss": max(answer["peak_rss"] for answer in one.answers),
    }


def by_dataset(one: Measured, prompts: list[Prompt]) -> dict[str, dict[str, Any]]:
    pairs = list(zip(prompts, one.answers, strict=True))
    return {
        name: totals([answer for prompt, answer in pairs if prompt.dataset == name])
        for name in DATASETS
    }


def totals(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute rates over all answers together, weighted by tokens."""
    decode_seconds = sum(answer["decode_seconds"] for answer in answers)
    seconds = sum(answer["seconds"] for answer in answers)
    num_tokens = sum(len(answer["token_ids"]) for answer in answers)
    decoded = sum(answer["decode_tokens"] for answer in answers)
    return {
        "tokens": num_tokens,
        "decode_tokens": decoded,
        "decode_seconds": decode_seconds,
        "decode_tokens_per_second": decoded / decode_seconds,
        "request_tokens_per_second": num_tokens / seconds,
        "speculation": figures(speculation_of(answers), seconds),
    }


def speculation_of(answers: list[dict[str, Any]]) -> SpeculationMetrics:
    fields = asdict(SpeculationMetrics())
    total = SpeculationMetrics()
    for answer in answers:
        given = {name: answer["speculation"].get(name, empty) for name, empty in fields.items()}
        total += SpeculationMetrics(
            **{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        )
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20, help="number of prompts per data set")

    parser.add_argument("--head", default=HEAD_NAME, help="path or short name")
    parser.add_argument(
        "--cascade-drafts", type=int, default=3, help="drafts of the head in a cascade"
    )
    parser.add_argument(
        "--cascade-match", type=int, default=4, help="shortest match that goes first"
    )
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python")
    parser.add_argument("--llama-model", help="GGUF file of llama.cpp, if it has another")
    parser.add_argument("--load-format", default="auto", help="ours: gguf-packed keeps 4 bits")
    parser.add_argument(
        "--trials",
        type=int,
        default=MAX_TRIALS,
        help="maximum runs per answer while other processes use the cores",
    )
    parser.set_defaults(repeats=1)
    measure(parser, run, report)


if __name__ == "__main__":
    main()
