"""Short runs of everything that accesses GPU memory, for compute-sanitizer.

    python benchmarks/law/sanitizer_gpu.py PART [--device cpu]

``sanitizer.sh`` runs it under the tools. eager and graph: a tiny Llama with dummy weights answers
a few requests with n-gram drafts, some of which are accepted, and with an EAGLE-3 head, and must
emit the tokens of plain decoding. hybrid-eager and hybrid-graph: the same for a tiny Qwen3-Next
with experts and its MTP module. kernels: matrix products with tiles that small models do not
select. Launches are few, because the tools make each one slow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
HEAD = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 300,
}
HYBRID = TARGET | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
# From 128 rows on, recurrent rows run without an early launch (PDL).
DENSE_CHUNK, HYBRID_CHUNK = 64, 128
# Around the edges of chunks and of KV blocks, which have 16 tokens.
PROMPT_LENGTHS = (1, 66, 143)
MAX_TOKENS = 10
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def write_config(folder: Path, config: dict) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def answers(target: str, speculation: dict | None, device: str, *, eager: bool, chunk: int):
    """Return tokens by request, and the number of accepted drafts."""
    core = build_engine(
        EngineConfig.from_options(
            model=target,
            load_format="dummy",
            device=device,
            dtype="bfloat16",
            speculative_config=speculation,
            enforce_eager=eager,
            max_num_seqs=2,
            max_model_len=192,
            prefill_chunk_size=chunk,
            max_num_batched_tokens=256,
            block_size=16,
        )
    )
    tokens: dict[str, list[int]] = {}
    for i, length in enumerate(PROMPT_LENGTHS):
        prompt = tuple((7 * j + i) % TARGET["vocab_size"] for j in range(length))
        params = SamplingParams(
            temperature=0.8 * (i % 2), top_k=20, top_p=0.9, seed=i, max_tokens=MAX_TOKENS
        )
        core.add_request(EngineRequest(str(i), prompt, params, length + MAX_TOKENS))
        tokens[str(i)] = []
    accepted = 0
    while core.has_unfinished:
        for update in core.step():
            accepted += update.num_accepted
            tokens[update.request_id] += update.token_ids
            if len(tokens[update.request_id]) >= MAX_TOKENS:
                core.release(update.request_id)
    return {name: out[:MAX_TOKENS] for name, out in tokens.items()}, accepted


def run_engines(device: str, *, eager: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = write_config(Path(folder) / "target", TARGET)
        head = write_config(Path(folder) / "head", HEAD)
        drafts = (NGRAM, {"method": "eagle3", "model": head, "num_speculative_tokens": 2})
        require_equal(target, drafts, device, eager=eager, chunk=DENSE_CHUNK)


def run_hybrids(device: str, *, eager: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = write_config(Path(folder) / "target", HYBRID)
        drafts = (NGRAM, {"method": "mtp", "num_speculative_tokens": 2})
        require_equal(target, drafts, device, eager=eager, chunk=HYBRID_CHUNK)


def require_equal(
    target: str, drafts: Iterable[dict], device: str, *, eager: bool, chunk: int
) -> None:
    expected, _ = answers(target, None, device, eager=eager, chunk=chunk)
    for speculation in drafts:
        found, accepted = answers(target, speculation, device, eager=eager, chunk=chunk)
        method = speculation["method"]
        assert found == expected, f"{method} changed a token"
        assert accepted or speculation is not NGRAM, "no draft of prompt lookup was accepted"
        print(f"{method}: {accepted} drafts accepted, the same tokens", flush=True)


def run_kernels() -> None:
    """Run loads through tensor descriptors, PDL and prefetches, at odd row counts."""
    from sametoken.ops.model.gemm.product import product
    from sametoken.ops.model.gemm.tuning import CANONICAL, TritonConfig

    forms = (
        TritonConfig(16, 32, 64, num_warps=4, num_stages=3, pdl=True),
        TritonConfig(16, 32, 64, num_warps=4, num_stages=3, tma=True, pdl=True),
        TritonConfig(128, 64, 64, num_warps=4, num_stages=3, tma=True),
    )
    generator = torch.Generator("cuda").manual_seed(0)
    matrix = torch.randn(96, 192, device="cuda", generator=generator).bfloat16()
    for rows, form in itertools.product((1, 17, 130), forms):
        x = torch.randn(rows, 192, device="cuda", generator=generator).bfloat16()
        for epilogue in ("none", "silu_mul", "logits"):
            expected = product(CANONICAL, x, matrix, epilogue)
            assert torch.equal(product(form, x, matrix, epilogue), expected), (rows, form)
    print("matrix products: the same bits", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"eager": run_engines, "graph": run_engines}
    parts |= {"hybrid-eager": run_hybrids, "hybrid-graph": run_hybrids}
    parser.add_argument("part", choices=(*parts, "kernels"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args()
    if args.part == "kernels":
        run_kernels()
    else:
        parts[args.part](args.device, eager=args.part.endswith("eager"))


if __name__ == "__main__":
    main()
