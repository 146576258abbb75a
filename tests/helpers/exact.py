"""Checkpoints of the families that have gradients, and rollouts as a trainer reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from helpers.families import FAMILIES, SIZES, fixed_config, random_model
from sametoken import LLM, SamplingParams

#: Families with layers that have no gradients.
REFUSED = ("gpt_oss",)
#: Families whose models every test of ``sametoken.exact`` runs.
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=6),
    **{name: lambda name=name: fixed_config(name) for name in FAMILIES if name not in REFUSED},
}
#: The routers of these choose others where a number is rounded, so gradients may jump.
WITH_EXPERTS = ("gemma4", "glm4_moe", "qwen3_moe")


def write_exact(directory: Path, name: str, seed: int = 0) -> Path:
    random_model(CONFIGS[name](), seed).save_pretrained(directory)
    return directory


def rollout(llm: LLM, prompts, params: SamplingParams):
    """Prompts with their answers, prompt lengths, and the answers' log-probabilities."""
    outputs = llm.generate(prompts, params)
    answers = [(out.prompt_token_ids, one) for out in outputs for one in out.outputs]
    sequences = [[*prompt, *answer.token_ids] for prompt, answer in answers]
    logprobs = [_chosen(answer) for _, answer in answers]
    return sequences, [len(prompt) for prompt, _ in answers], logprobs


def _chosen(answer) -> torch.Tensor:
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return torch.tensor([entry[token].logprob for token, entry in pairs])


def all_equal(ours, theirs) -> bool:
    """Whether tensors are equal one by one, to the bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
