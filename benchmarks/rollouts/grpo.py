"""GRPO with exact rollouts: the same weights, to the bit, with speculation and without.

A small random Llama learns to count (6 7 8 9 0 1 ...). Rollouts come from an engine, gradients
from ``sametoken.exact``. Every step compares the trainer's log-probabilities with the rollout's:
they are equal in every token, so the importance ratio is 1 and the KL divergence 0. The training
runs once for each drafter; the exit status is 1 if a log-probability or the final weights differ.

    python benchmarks/rollouts/grpo.py --steps 60 --drafters none ngram suffix
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sametoken import LLM, RequestOutput, SamplingParams
from sametoken.exact import ExactModel

DIGITS = 10
SIZES = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
DRAFTERS = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
}


@dataclass(frozen=True)
class Options:
    """What is trained, and for how long.

    Attributes:
        num_prompts, group: prompts of a step, and answers to each.
        max_tokens: length of an answer.
        clip: range of the importance ratio, as in PPO.
    """

    steps: int = 60
    num_prompts: int = 4
    group: int = 16
    max_tokens: int = 24
    learning_rate: float = 5e-3
    clip: float = 0.2
    dtype: str = "float32"
    seed: int = 0


@dataclass
class Run:
    """What one training gave.

    Attributes:
        rewards: mean reward by step.
        worst_ratio, worst_kl: of all tokens of all steps; 1 and 0 where all bits are equal.
        unequal: tokens whose log-probabilities differ between trainer and rollout.
    """

    drafter: str
    rewards: list[float] = field(default_factory=list)
    tokens: int = 0
    unequal: int = 0
    worst_ratio: float = 1.0
    worst_kl: float = 0.0
    rollout_seconds: float = 0.0
    seconds: float = 0.0
    accepted: int = 0
    engine_steps: int = 0
    sha256: str = ""


def write_model(directory: Path, seed: int) -> Path:
    """A random Llama as a checkpoint."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(directory)
    return directory


def prompts_of(step: int, options: Options) -> list[list[int]]:
    """The beginnings of counts."""
    starts = [(step * options.num_prompts + i) * 7 for i in range(options.num_prompts)]
    return [[(start + i) % DIGITS for i in range(3)] for start in starts]


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The share of tokens that are the successors of those before them."""
    tokens = [prompt[-1], *answer]
    right = [b == (a + 1) % DIGITS for a, b in pairwise(tokens) if a < DIGITS]
    return sum(right) / len(answer)


def rollout(llm: LLM, step: int, options: Options) -> list[RequestOutput]:
    """``group`` sampled answers to every prompt, with the log-probabilities of their tokens."""
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(step, options)]
    params = SamplingParams(
        n=options.group,
        temperature=1.0,
        seed=options.seed + step,
        max_tokens=options.max_tokens,
        logprobs=0,
        detokenize=False,
    )
    return llm.generate(prompts, params)


def rollout_logprobs(answer) -> Tensor:
    """[n] fp32, as the engine computed them."""
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return torch.tensor([entry[token].logprob for token, entry in pairs], dtype=torch.float32)


def advantages(rewards: Tensor) -> Tensor:
    """[prompts, group], normed within each group."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def train_step(
    model: ExactModel,
    optimizer: torch.optim.Optimizer,
    outputs: list[RequestOutput],
    run: Run,
    options: Options,
) -> None:
    """One update of the parameters from one rollout."""
    samples = [(out.prompt_token_ids, answer) for out in outputs for answer in out.outputs]
    rewards = torch.tensor([reward(prompt, answer.token_ids) for prompt, answer in samples])
    by_group = advantages(rewards.view(-1, options.group)).flatten()
    sequences = [[*prompt, *answer.token_ids] for prompt, answer in samples]
    new = model(sequences, [len(prompt) for prompt, _ in samples])
    loss = torch.zeros(())
    for (_, answer), logprobs, advantage in zip(samples, new, by_group, strict=True):
        old = rollout_logprobs(answer)
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
        loss = loss - torch.minimum(ratio * advantage, clipped * advantage).mean()
        note(run, logprobs.detach(), old)
    optimizer.zero_grad()
    (loss / len(samples)).backward()
    optimizer.step()
    run.rewards.append(rewards.mean().item())


def note(run: Run, new: Tensor, old: Tensor) -> None:
    """Count tokens whose log-probabilities differ; keep the worst ratio and KL estimate (k3)."""
    difference = new - old
    kl = difference.exp() - difference - 1
    run.tokens += len(old)
    run.unequal += int((new != old).sum())
    run.worst_ratio = max(run.worst_ratio, difference.abs().exp().max().item())
    run.worst_kl = max(run.worst_kl, kl.abs().max().item())


def train(path: Path, drafter: str, options: Options) -> Run:
    """Train from a checkpoint, with rollouts by a drafter."""
    run, began = Run(drafter), time.monotonic()
    model = ExactModel(str(path), dtype=options.dtype, device="cpu")
    # An optimizer wants fp32 parameters; every pass, and every update, rounds them to the dtype.
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    llm = LLM(
        str(path),
        dtype=options.dtype,
        device="cpu",
        skip_tokenizer_init=True,
        speculative_config=DRAFTERS[drafter],
    )
    for step in range(options.steps):
        started = time.monotonic()
        outputs = rollout(llm, step, options)
        run.rollout_seconds += time.monotonic() - started
        train_step(model, optimizer, outputs, run, options)
        llm.update_weights(model.state_dict().items())
    run.accepted = llm.speculation_metrics.num_accepted_tokens
    run.engine_steps = llm.speculation_metrics.num_steps
    run.seconds = time.monotonic() - began
    run.sha256 = sha256(model)
    return run


def sha256(model: torch.nn.Module) -> str:
    """Of all parameters, names included."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def report(runs: list[Run]) -> None:
    print(
        "| drafter | reward first -> last | tokens | unequal | ratio | KL | accepted | "
        "tokens per step | rollouts | all | SHA-256 of the weights |"
    )
    print("|" + "---|" * 11)
    for run in runs:
        print(
            f"| {run.drafter} | {run.rewards[0]:.2f} -> {run.rewards[-1]:.2f} | {run.tokens} | "
            f"{run.unequal} | {run.worst_ratio:g} | {run.worst_kl:g} | {run.accepted} | "
            f"{run.tokens / run.engine_steps:.2f} | {run.rollout_seconds:.1f} s | "
            f"{run.seconds:.1f} s | {run.sha256[:16]} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=Options.dtype)
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    given = parser.parse_args()
    options = Options(steps=given.steps, dtype=given.dtype)
    with tempfile.TemporaryDirectory() as directory:
        path = write_model(Path(directory), options.seed)
        runs = [train(path, drafter, options) for drafter in given.drafters]
    report(runs)
    equal = len({run.sha256 for run in runs}) == 1 and not any(run.unequal for run in runs)
    print("all bits equal" if equal else "BITS DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
