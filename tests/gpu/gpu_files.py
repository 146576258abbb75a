"""Random targets, drafters and requests that the GPU tests share."""

from __future__ import annotations

import torch

from helpers.checkpoints import head_tensors, write_checkpoint, write_llama, write_safeailab
from helpers.families import write_family
from helpers.harness import request
from helpers.hybrids import FULL, LINEAR, hybrid_tensors
from helpers.nextn_files import nextn_tensors
from helpers.state_heads import medusa_tensors, mlp_tensors, write_medusa, write_mlp
from sametoken import SamplingParams

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
#: Gated DeltaNet at the real head shape.
HYBRID_SIZES = {
    "vocab_size": 1500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL]}
#: Adaptive limits may withhold every draft on random weights, whose matches end at once.
LONG_NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 64,
    "prompt_lookup_max": 10,
    "prompt_lookup_min": 1,
    "draft_limits": "fixed",
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
    """A target, a draft model that disagrees with it, an EAGLE-3 head, and heads without KV."""
    target = write_target(folder / "target", architecture)
    other = write_target(folder / "other", architecture, seed=9)
    head = write_safeailab(
        folder / "head", head_tensors(**SIZES), **SIZES | {"num_hidden_layers": 1}
    )
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size")}
    medusa = write_medusa(folder / "medusa", medusa_tensors(**sizes), **sizes)
    widths = {"emb_dim": sizes["hidden_size"], "inner_dim": 128, "scale_input": True}
    mlp = write_mlp(folder / "mlp", mlp_tensors(width=128, **sizes), **sizes | widths)
    return {"target": target, "other": other, "head": head, "medusa": medusa, "mlp": mlp}


def write_target(folder, architecture: str, seed: int = 0, *, tied: bool = False, **changes):
    """A random model of ``SIZES``; a Qwen3 may be tied."""
    sizes = SIZES | changes
    if architecture == "LlamaForCausalLM":
        return write_llama(folder, seed=seed, **sizes)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**sizes, initializer_range=0.08, tie_word_embeddings=tied)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_small_family(folder, name: str):
    """A random model of one of ``helpers.families``, of sizes that kernels of a GPU take."""
    shared = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    sizes = {key: SIZES[key] for key in shared}
    if name not in ("bamba", "granite", "granite_hybrid", "olmo2", "phi3", "qwen2"):
        sizes["head_dim"] = 64
    if name == "gemma4":
        sizes |= {"global_head_dim": 512, "vocab_size_per_layer_input": SIZES["vocab_size"]}
    return write_family(folder, name, **sizes)


def write_hybrid_target(folder, config: dict, seed: int = 0):
    """A hybrid in bf16 of slow decay: what was folded once is seen for long."""
    tensors = hybrid_tensors(config, seed)
    for name, tensor in tensors.items():
        tensors[name] = tensor - 3 if name.endswith("A_log") else tensor.bfloat16()
    return write_checkpoint(folder, config, tensors)


def write_nextn_target(folder, num_heads: int):
    """GLM-4.7-Flash's latents and rotated keys over small sizes, with a random NextN module."""
    from safetensors.torch import load_file, save_file
    from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

    torch.manual_seed(0)
    config = Glm4MoeLiteConfig(
        vocab_size=1500,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        num_nextn_predict_layers=1,
        initializer_range=0.08,
        eos_token_id=None,
    )
    Glm4MoeLiteForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    module = nextn_tensors(config, tensors, 0)
    save_file(tensors | {name: one.bfloat16() for name, one in module.items()}, path)
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
        "medusa": {"model": str(files["medusa"])},
        "mlp": {"model": str(files["mlp"])},
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


#: What models' own generation settings ask for, each cut alone, all together, and none.
CUTS: tuple[dict, ...] = (
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 3},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 700, "top_p": 0.99, "min_p": 0.001},
    {"temperature": 0.0, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.8},
)


def cut_requests(count: int, max_tokens: int):
    """The prompts of ``requests`` with the parameters of ``CUTS`` in turn, and no others."""
    for i, item in enumerate(requests(count, max_tokens)):
        cuts = CUTS[i % len(CUTS)]
        yield request(item.request_id, item.prompt_token_ids, max_tokens, seed=i, **cuts)


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


def for_llm(items, logprobs: int):
    """Prompts and parameters of requests, without penalties and cuts."""
    params = [
        SamplingParams(
            max_tokens=item.params.max_tokens,
            temperature=item.params.temperature,
            seed=item.params.seed,
            logprobs=logprobs,
            ignore_eos=True,
            detokenize=False,
        )
        for item in items
    ]
    return [{"prompt_token_ids": [*item.prompt_token_ids]} for item in items], params


def plain_requests(count: int, max_tokens: int):
    """Those of ``requests`` whose logits need no processing."""
    return [item for item in requests(count, max_tokens) if item.params.top_p == 1]
