"""Small engines whose weights change: how they are built, and all that they say."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from sametoken import LLM, SamplingParams
from sametoken.models.in_place import Replacement

#: Tokens 0 and 1 begin every prompt; repeats give n-grams to find, and the last two share blocks.
PROMPTS = [
    {"prompt_token_ids": [0, 1, *ids]}
    for ids in ([5, 6, 5, 6, 5, 6, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 9, 8, 7], [9, 8, 7, 6, 5, 4])
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
_OPTIONS = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "num_kv_blocks": 48,
    "block_size": 4,
    "max_num_seqs": 3,
    "max_model_len": 40,
}


def params(max_tokens: int = 10, **changes) -> SamplingParams:
    """Sampled, with the log-probabilities of three tokens."""
    options = {"temperature": 0.8, "seed": 3, "logprobs": 3, "ignore_eos": True} | changes
    return SamplingParams(max_tokens=max_tokens, detokenize=False, **options)


def engine(path: Path, spec: dict | None = None, **options) -> LLM:
    """A small engine on the CPU."""
    return LLM(str(path), speculative_config=spec, **_OPTIONS | options)


def tensors_of(path: Path) -> dict:
    """All tensors of a checkpoint."""
    files = sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def forms_of(tensors: dict[str, torch.Tensor]) -> dict:
    """What a trainer says of tensors that it sends or shares."""
    return {
        "names": list(tensors),
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
        "shapes": [list(one.shape) for one in tensors.values()],
    }


def said(llm: LLM, prompts=PROMPTS) -> list:
    """Token ids and log-probabilities, to the bit, of prompts that run together."""
    outputs = llm.generate(prompts, params(7))
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


def same_weights(one: LLM, other: LLM) -> bool:
    """Whether target and drafter of both have the same tensors, to the bit."""
    mine, theirs = (
        (w.model, w.drafter.model) for w in (one._engine.weights, other._engine.weights)
    )
    return all(torch.equal(*pair) for pair in Replacement.of(mine, theirs).pairs)
