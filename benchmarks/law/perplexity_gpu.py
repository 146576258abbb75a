"""Perplexity on GSM8K: the engine's in bf16 beside that of transformers, within 0.5 %.

    python benchmarks/law/perplexity_gpu.py MODEL.gguf [--transformers float32] [--json PATH]

The text is the first 100 test questions with their answers (``data/gsm8k_test_100.jsonl``),
in separately scored windows of 1024 tokens. Ours are the engine's ``prompt_logprobs``. The other
side is the number in ``data/gsm8k_perplexity.json``, which transformers computed in fp32 on a CPU
from the same file (``--record`` computes it again) and, with ``--transformers``, transformers on
this machine. Exits with 1 if ours is outside the tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch

from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.llm import LLM
from sametoken.models.load.gguf_file import read_gguf
from sametoken.text.gguf_tokenizer import build_gguf_tokenizer
from sametoken.types.sampling_params import SamplingParams

DATA = Path(__file__).parent / "data"
TEXT, RECORD = DATA / "gsm8k_test_100.jsonl", DATA / "gsm8k_perplexity.json"
WINDOW = 1024
TOLERANCE = 0.005


def read_windows(model: Path) -> list[list[int]]:
    """Split the token ids of the text into windows; an incomplete one is left out."""
    rows = [json.loads(line) for line in TEXT.read_text(encoding="utf-8").splitlines()]
    text = "\n\n".join(f"{row['question']}\n{row['answer']}" for row in rows)
    token_ids = build_gguf_tokenizer(read_gguf(model).metadata).encode(text).ids
    return [token_ids[i : i + WINDOW] for i in range(0, len(token_ids) - WINDOW + 1, WINDOW)]


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def ours(
    model: Path, windows: list[list[int]], device: str, dtype: str, load_format: str = "auto"
) -> float:
    """Compute our perplexity; a window's first token has no predecessor and is not scored."""
    config = EngineConfig.from_options(
        model=str(model),
        device=device,
        dtype=dtype,
        load_format=load_format,
        skip_tokenizer_init=True,
        max_model_len=WINDOW + 1,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory_bytes=2**30,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    llm = LLM.from_engine(build_engine(config), None)
    outputs = llm.generate([{"prompt_token_ids": window} for window in windows], params)
    scored = []
    for window, output in zip(windows, outputs, strict=True):
        found = output.prompt_logprobs[1:]
        scored += [here[token].logprob for token, here in zip(window[1:], found, strict=True)]
    return perplexity(scored)


@torch.inference_mode()
def theirs(model: Path, windows: list[list[int]], device: str, dtype: str) -> float:
    """Compute transformers' perplexity on the same weights; log-probabilities in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # As from_pretrained(gguf_file=...), without its requirement of the accelerate package.
    config = AutoConfig.from_pretrained(model.parent, gguf_file=model.name, trust_remote_code=False)
    loaded = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    parsed = load_gguf_checkpoint(str(model), return_tensors=True, model_to_load=loaded)
    loaded.load_state_dict(parsed["tensors"], strict=False)
    loaded.tie_weights()
    loaded.to(device)
    scored = []
    for window in windows:
        token_ids = torch.tensor([window], device=device)
        logprobs = loaded(token_ids).logits[0, :-1].float().log_softmax(dim=-1)
        scored += logprobs.gather(1, token_ids[0, 1:, None]).squeeze(1).tolist()
    return perplexity(scored)


def record(model: Path, windows: list[list[int]]) -> None:
    """Record transformers' perplexity in fp32 on a CPU."""
    import transformers

    RECORD.write_text(
        json.dumps(
            {
                "perplexity": theirs(model, windows, "cpu", "float32"),
                "num_windows": len(windows),
                "window": WINDOW,
                "model": model.name,
                "side": f"transformers {transformers.__version__}, torch {torch.__version__}, fp32",
                "recipe": f"python benchmarks/law/{Path(__file__).name} MODEL.gguf --record",
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )


def compared(model: Path, windows: list[list[int]], device: str, args: argparse.Namespace):
    """Yield (side, perplexity, ratio of ours to it), ours first."""
    started = time.perf_counter()
    found = ours(model, windows, device, args.dtype)
    seconds = time.perf_counter() - started
    yield f"ours, {args.dtype}, {device}, {seconds:.1f} s", found, 1.0
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    if (recorded["num_windows"], recorded["model"]) == (len(windows), model.name):
        yield (
            recorded["side"] + ", recorded",
            recorded["perplexity"],
            found / recorded["perplexity"],
        )
    if args.transformers:
        other = theirs(model, windows, device, args.transformers)
        yield f"transformers, {args.transformers}, {device}", other, found / other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--num-windows", type=int, help="fewer than all")
    parser.add_argument("--transformers", choices=("bfloat16", "float32"))
    parser.add_argument("--record", action="store_true", help="only write the recorded number")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    windows = read_windows(args.model)[: args.num_windows]
    if args.record:
        record(args.model, windows)
        return
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for row in compared(args.model, windows, device, args):
        rows.append(row)
        print(f"{row[0]}: perplexity {row[1]:.4f}, ours over it {row[2]:.5f}", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"windows": len(windows), "rows": rows}) + "\n")
    if len(rows) == 1:
        sys.exit("nothing to compare with: other weights or windows than recorded")
    sys.exit(int(any(abs(ratio - 1) > TOLERANCE for _, _, ratio in rows)))


if __name__ == "__main__":
    main()
