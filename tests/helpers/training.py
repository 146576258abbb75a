"""A tiny target and text that it wrote itself, for trainings of seconds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from helpers.checkpoints import change_tensors, write_llama
from sametoken import LLM, SamplingParams
from sametoken.errors import ConfigError
from sametoken.train.distillation import TrainingText
from sametoken.train.options import LoopOptions
from sametoken.types.outputs import SpeculationMetrics

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
NUM_PROMPTS, PROMPT_LEN, ANSWER_LEN = 16, 5, 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER_LEN, ignore_eos=True)
LOOP = LoopOptions(
    steps=4,
    warmup_steps=2,
    batch_tokens=160,
    max_length=64,
    learning_rate=3e-3,
    validation=0.0,
    device="cpu",
)


def write_target(directory: Path) -> Path:
    return write_llama(directory, 3, **SIZES)


def with_bad_weights(target: Path, directory: Path) -> Path:
    """A copy of a target that is refused as soon as its weights are read."""
    shutil.copytree(target, directory)
    nan = torch.nan
    return change_tensors(directory, lambda old: {n: t.fill_(nan) for n, t in old.items()})


def open_llm(model: Path, **options) -> LLM:
    return LLM(str(model), skip_tokenizer_init=True, device="cpu", dtype="float32", **options)


def prompts_of(num_prompts: int = NUM_PROMPTS) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(SIZES["vocab_size"], (num_prompts, PROMPT_LEN), generator=generator)
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def write_own_text(model: Path, path: Path, **options) -> list[list[int]]:
    """The target's greedy answers, as training text and as they are."""
    outputs = open_llm(model, **options).generate(prompts_of(), GREEDY)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    rows = [p | {"output_token_ids": a} for p, a in zip(prompts_of(), answers, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return answers


#: Text that does not fit a target of ``SIZES`` and ``LOOP``, and why.
MISFITS = [
    (
        {"prompt_token_ids": [1], "output_token_ids": [2, 61]},
        r"line 1 .* token ids outside 0\.\.60",
    ),
    ({"prompt_token_ids": [1] * 64, "output_token_ids": [2, 3]}, "no answer of two tokens within"),
]


def require_refused_early(train: Callable, target: Path, directory: Path, row, says: str) -> None:
    """That ``train(target, output, text)`` refuses a row's text before it reads weights."""
    unreadable = with_bad_weights(target, directory / "target")
    (directory / "text.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=says):
        train(unreadable, directory / "out", TrainingText(file=directory / "text.jsonl"))


def require_own_settings(train: Callable, target: Path, output: Path, loop: LoopOptions) -> None:
    """That an unfinished training is resumed with its settings alone, before any text is read."""
    other, nowhere = replace(loop, resume=True, seed=5), TrainingText(file=output / "none")
    with pytest.raises(ConfigError, match=r"other settings: \['seed'\]"):
        train(target, output, nowhere, loop=other)


def require_one_error_without_memory(train: Callable, owner: object, name: str) -> None:
    """That ``train()`` ends in one error where ``owner``'s function of this name has no memory."""

    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    words = r"the training .* \(CUDA out of memory\)\. Use a smaller"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(ConfigError, match=words):
            train()


def require_mixed_precision(train: Callable, loop: LoopOptions) -> None:
    """That ``train(name, loop)`` in bf16 has nearly the loss of fp32; its weights stay in fp32."""
    linear, seen = functional.linear, set()

    def noted(x, weight, bias=None):
        out = linear(x, weight, bias)
        seen.add((weight.dtype, out.dtype))
        return out

    one = train("one", replace(loop, dtype="float32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", noted)
        other = train("other", replace(loop, dtype="bfloat16"))
    assert one.loss == pytest.approx(other.loss, rel=0.05)
    assert (torch.float32, torch.bfloat16) in seen


def require_accepted(
    target: Path, model: Path, speculative: dict, length: float, rel: float = 0.03
) -> SpeculationMetrics:
    """Drafts change no token of the target's, and as many are accepted as training measured.

    Args:
        target: speaks alone.
        model: the target of the drafts.
        speculative: its speculative config.
        length: the acceptance length that training said.
        rel: how far the engine's may be from that.

    Returns:
        The engine's counters.
    """
    plain = open_llm(target).generate(prompts_of(), GREEDY)
    llm = open_llm(model, speculative_config=speculative)
    drafted = llm.generate(prompts_of(), GREEDY)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    # The engine's counters, except of the steps of prefill, which have no drafts.
    metrics = llm.speculation_metrics
    assert 1 + metrics.num_accepted_tokens / (metrics.num_steps - NUM_PROMPTS) == pytest.approx(
        length, rel=rel
    )
    # Chance is one token of all, twice in a row almost never.
    assert metrics.acceptance_per_position[0] > 10 / SIZES["vocab_size"]
    return metrics
