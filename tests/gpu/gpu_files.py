"""Random targets, drafters and requests that the GPU tests share."""

from __future__ import annotations

import torch

from helpers.checkpoints import head_tensors, write_llama, write_safeailab
from helpers.harness import request

SIZES = {
    "vocab_size": 1500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
LENGTHS = (1, 5, 16, 17, 63, 64, 65, 130, 300, 513)
OPTIONS = {
    # The GPU: without one nothing is collected here, and code that needs none can be tried.
    "device": "auto",
    "dtype": "bfloat16",
    "max_model_len": 640,
    "prefill_chunk_size": 128,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 2**30,
}


def write_files(folder, architecture: str):
    """A target, a draft model that disagrees with it, and an EAGLE-3 head."""
    target = write_target(folder / "target", architecture)
    other = write_target(folder / "other", architecture, seed=9)
    head = write_safeailab(
        folder / "head", head_tensors(**SIZES), **SIZES | {"num_hidden_layers": 1}
    )
    return {"target": target, "other": other, "head": head}


def write_target(folder, architecture: str, seed: int = 0):
    if architecture == "LlamaForCausalLM":
        return write_llama(folder, seed=seed, **SIZES)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**SIZES, initializer_range=0.08, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def speculation(files) -> dict[str, dict | None]:
    return {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3},
        "self": {
            "method": "draft_model",
            "model": str(files["target"]),
            "num_speculative_tokens": 3,
        },
        "other": {
            "method": "draft_model",
            "model": str(files["other"]),
            "num_speculative_tokens": 2,
        },
        "eagle3": {
            "method": "eagle3",
            "model": str(files["head"]),
            "num_speculative_tokens": 3,
        },
        "suffix": {
            "method": "suffix",
            "num_speculative_tokens": 6,
            "suffix_decoding_max_cached_requests": 16,
        },
        "cascade": {
            "method": "eagle3",
            "model": str(files["head"]),
            "num_speculative_tokens": 4,
            "cascade": "ngram",
            "cascade_min_match": 2,
        },
    }


def requests(count: int, max_tokens: int):
    """Prompts of all lengths; every third is sampled, every seventh has top-p and penalties."""
    generator = torch.Generator().manual_seed(1)
    for i in range(count):
        length = LENGTHS[i % len(LENGTHS)]
        period = 3 + i % 5
        pattern = torch.randint(0, 1500, (period,), generator=generator).tolist()
        prompt = tuple((pattern * (length // period + 1))[:length])
        params: dict = {"seed": i}
        if i % 3 == 1:
            params["temperature"] = 0.8
        if i % 7 == 5:
            params |= {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}
        yield request(f"r{i}", prompt, max_tokens=max_tokens, **params)
