"""GRPO on GSM8K with SmolLM2 on one GPU: trainer and engine in one process, equal to the bit.

    python benchmarks/rollouts/gsm8k_grpo.py gsm8k_train.jsonl none.json
    python benchmarks/rollouts/gsm8k_grpo.py gsm8k_train.jsonl eagle3.json --speculation eagle3
    python benchmarks/rollouts/gsm8k_report.py none.json eagle3.json --html gsm8k.html

Each step samples answers at temperature 1, compares every token's log-probability by the trainer
with the engine's, makes one AdamW step and updates the engine in place. The exit status is 1 if a
log-probability differed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# cuBLAS reads it when CUDA starts; without it its sums may depend on the run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from grpo import advantages, sha256
from torch import nn
from trained_head import TrainedHead

from sametoken import LLM, RequestOutput, SamplingParams
from sametoken.exact import ExactModel
from sametoken.types.outputs import CompletionOutput, SpeculationMetrics

# The head of "eagle3-trained" is trained along; that of "eagle3" goes stale.
DRAFTERS = ("none", "ngram", "suffix", "eagle3", "eagle3-trained")
REQUEST = '{question}\nThink in short steps. Then end with "#### " and the number.'
MARKED = re.compile(r"####[ \t]*\$?(-?\d[\d,]*(?:\.\d+)?)")
# Of an answer that ends by itself, has a number after the mark, and has the right one there.
REWARDS = (0.25, 0.25, 1.0)
# A shorter answer gets nothing: the first two rewards alone are soonest had by saying little.
FEWEST_WORDS = 20
#: A prompt's token ids, and an answer.
Sample = tuple[Sequence[int], CompletionOutput]


@dataclass(frozen=True)
class Options:
    """What is trained, for how long, and with which drafter.

    Attributes:
        prompts, group: questions of a step, and answers to each.
        pass_answers: answers of one forward and backward pass.
        dtype: of the engine and of the passes; parameters are fp32.
    """

    model: str = "smollm2"
    speculation: str = "none"
    num_speculative_tokens: int = 3
    steps: int = 50
    prompts: int = 16
    group: int = 16
    max_tokens: int = 160
    max_model_len: int = 512
    pass_answers: int = 128
    learning_rate: float = 2e-5
    head_learning_rate: float = 5e-5
    seed: int = 0
    device: str = "auto"
    dtype: str = "bfloat16"
    kv_cache_memory_bytes: int = 4 * 2**30


@dataclass(frozen=True)
class Step:
    """Figures of one step.

    Attributes:
        ended, marked, right: shares of the answers, see ``REWARDS``.
        tokens_per_step: of a request's step of the engine; 1 without speculation.
        acceptance: accepted drafts over offered ones.
        differing: tokens whose log-probabilities differ between trainer and engine.
        answers_sha256: of all token ids.
        weights_sum: of the parameters' bits, read as integers.
    """

    reward: float
    ended: float
    marked: float
    right: float
    answers: int
    tokens: int
    tokens_per_step: float
    acceptance: float
    differing: int
    generation_seconds: float
    training_seconds: float
    update_seconds: float
    head_seconds: float
    answers_sha256: str
    weights_sum: int


def engine_of(options: Options) -> LLM:
    """An engine that runs all answers of a step at once."""
    method = options.speculation.removesuffix("-trained")
    drafter = {"method": method, "num_speculative_tokens": options.num_speculative_tokens}
    if method == "eagle3":
        drafter["model"] = "smollm2-eagle3"
    return LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.prompts * options.group,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        speculative_config=None if options.speculation == "none" else drafter,
    )


def read_questions(path: Path) -> list[tuple[str, str]]:
    """Questions, and the numbers that answer them."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["question"], row["answer"].rpartition("#### ")[2]) for row in rows]


def rollout(
    llm: LLM, questions: list[tuple[str, str]], step: int, options: Options
) -> list[RequestOutput]:
    """``group`` sampled answers to every question, with their log-probabilities."""
    texts = [REQUEST.format(question=question) for question, _ in questions]
    params = SamplingParams(
        n=options.group,
        temperature=1.0,
        seed=options.seed + step,
        max_tokens=options.max_tokens,
        logprobs=0,
    )
    return llm.chat([[{"role": "user", "content": text}] for text in texts], params)


def judged(answer: CompletionOutput, number: str) -> tuple[bool, bool, bool]:
    """For which of ``REWARDS`` it counts; of several marked numbers the last one is meant."""
    if len(answer.text.split()) < FEWEST_WORDS:
        return False, False, False
    marked = MARKED.findall(answer.text)
    right = bool(marked) and float(marked[-1].replace(",", "")) == float(number.replace(",", ""))
    return answer.finish_reason == "stop", bool(marked), right


def gradients(model: ExactModel, samples: list[Sample], weights: list[float]) -> int:
    """Add the gradients of some of a step's answers; returns the number of differing tokens."""
    device = next(model.parameters()).device
    sequences = [[*prompt, *answer.token_ids] for prompt, answer in samples]
    new = torch.cat(model(sequences, [len(prompt) for prompt, _ in samples]))
    pairs = [zip(answer.token_ids, answer.logprobs, strict=True) for _, answer in samples]
    old = torch.tensor([entry[token].logprob for pair in pairs for token, entry in pair])
    lengths = torch.tensor([len(answer.token_ids) for _, answer in samples])
    weight = (torch.tensor(weights) / lengths).repeat_interleave(lengths).to(device)
    # GRPO clips this ratio. One update for each rollout leaves it at exactly 1.
    ratio = (new - old.to(device)).exp()
    (-(ratio * weight).sum()).backward()
    return int((new.detach() != old.to(device)).sum())


def update(
    model: ExactModel,
    optimizer: torch.optim.Optimizer,
    samples: list[Sample],
    weights: list[float],
    options: Options,
) -> int:
    """One step of the optimizer; returns the number of differing tokens."""
    # The engine needs no such switch.
    torch.use_deterministic_algorithms(True)
    differing = 0
    for first in range(0, len(samples), options.pass_answers):
        group = slice(first, first + options.pass_answers)
        means = [weight / len(samples) for weight in weights[group]]
        differing += gradients(model, samples[group], means)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    torch.use_deterministic_algorithms(False)
    return differing


def seconds_since(began: float) -> float:
    """When a GPU has done all that was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - began


def train_step(
    llm: LLM,
    model: ExactModel,
    optimizer: torch.optim.Optimizer,
    head: TrainedHead | None,
    questions: list[tuple[str, str]],
    step: int,
    options: Options,
) -> Step:
    """Roll out, train, update the engine."""
    began = time.monotonic()
    outputs = rollout(llm, questions, step, options)
    generation = seconds_since(began)
    samples = [(output.prompt_token_ids, one) for output in outputs for one in output.outputs]
    numbers = [number for _, number in questions for _ in range(options.group)]
    found = [judged(one, number) for (_, one), number in zip(samples, numbers, strict=True)]
    rewards = torch.tensor(found, dtype=torch.float32) @ torch.tensor(REWARDS)
    ended, marked, right = (sum(kind) / len(samples) for kind in zip(*found, strict=True))
    weights = advantages(rewards.view(-1, options.group)).flatten().tolist()
    began = time.monotonic()
    differing = update(model, optimizer, samples, weights, options)
    training = seconds_since(began)
    began = time.monotonic()
    llm.update_weights(model.state_dict().items())
    updating = seconds_since(began)
    began = time.monotonic()
    if head:
        texts = [((*prompt, *answer.token_ids), len(prompt)) for prompt, answer in samples]
        llm.update_weights(head.step(model, texts).items(), target="drafter")
    counters = sum((out.metrics.speculation for out in outputs), SpeculationMetrics())
    token_ids = [list(answer.token_ids) for _, answer in samples]
    return Step(
        reward=rewards.mean().item(),
        ended=ended,
        marked=marked,
        right=right,
        answers=len(samples),
        tokens=sum(map(len, token_ids)),
        tokens_per_step=counters.acceptance_length,
        acceptance=counters.acceptance_rate,
        differing=differing,
        generation_seconds=generation,
        training_seconds=training,
        update_seconds=updating,
        head_seconds=seconds_since(began),
        answers_sha256=hashlib.sha256(json.dumps(token_ids).encode()).hexdigest(),
        weights_sum=sum(int(p.detach().view(torch.int32).sum()) for p in model.parameters()),
    )


def train(questions: list[tuple[str, str]], options: Options) -> dict[str, Any]:
    """Train, and describe the run as JSON values."""
    began = time.monotonic()
    # Products of the backward pass; the engine's kernels decide on their own.
    torch.set_float32_matmul_precision("high")
    torch.utils.deterministic.fill_uninitialized_memory = False
    model = ExactModel(
        options.model,
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.max_model_len,
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    llm, head = engine_of(options), None
    if options.speculation.endswith("-trained"):
        head = TrainedHead(model, options.max_model_len, options.head_learning_rate)
    setup, steps = seconds_since(began), list[Step]()
    for index, first in enumerate(range(0, options.steps * options.prompts, options.prompts)):
        asked = [questions[i % len(questions)] for i in range(first, first + options.prompts)]
        steps.append(train_step(llm, model, optimizer, head, asked, index, options))
        print(json.dumps({"step": index} | asdict(steps[-1])), file=sys.stderr, flush=True)
    on_gpu = next(model.parameters()).is_cuda
    return {
        "settings": asdict(options),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "setup_seconds": setup,
        "seconds": seconds_since(began),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        "sha256": sha256(model),
        "steps": [asdict(step) for step in steps],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("questions", type=Path, help="GSM8K's JSON lines: question, answer")
    parser.add_argument("output", type=Path, help="JSON file for the figures")
    for option in fields(Options):
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            type=type(option.default),
            default=option.default,
            choices=DRAFTERS if option.name == "speculation" else None,
        )
    given = vars(parser.parse_args())
    output, questions = given.pop("output"), read_questions(given.pop("questions"))
    run = train(questions, Options(**given))
    output.write_text(json.dumps(run, indent=1) + "\n")
    differing = sum(step["differing"] for step in run["steps"])
    tokens = sum(step["tokens"] for step in run["steps"])
    print(f"{differing} of {tokens} log-probabilities differ; weights {run['sha256'][:16]}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
