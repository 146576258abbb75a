"""The cost of LoRA adapters: decode steps and prompts of 1, 8 and 64 requests.

    python benchmarks/steps/adapters_gpu.py MODEL [--rank R] [--adapters A] [--json PATH]

MODEL is a directory with a config.json of a dense model; weights and adapters of all its
projections are random, so only times are meaningful. Requests have 512 tokens and come at once. Of
them none, all, or all with another adapter in turns have one; the first line has an engine without
adapters, the others one to which they come.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sametoken import LLM, SamplingParams

COUNTS, INPUT, OUTPUT = (1, 8, 64), 512, 64


def write_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> str:
    """Random factors of all projections of all layers."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (size, width) in shapes.items():
            own = f"base_model.model.model.layers.{layer}.{name}"
            for factor, shape in (("A", (rank, width)), ("B", (size, rank))):
                noise = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
                tensors[f"{own}.lora_{factor}.weight"] = noise * 1e-3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


def seconds(llm: LLM, names: list[str | None], max_tokens: int) -> float:
    """The time of a crowd, which has an adapter for each of its requests."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    prompts = [
        torch.randint(10, 1000, (INPUT,), generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in range(len(names))
    ]
    llm.reset_prefix_cache()
    begun = time.monotonic()
    llm.generate(prompts, params, lora_request=names)
    return time.monotonic() - begun


def measure(llm: LLM, chosen: list[str | None]) -> dict[str, float]:
    """Milliseconds of a step, and of the prompts, by number of requests; ``chosen`` in turns."""
    found = {}
    for count in COUNTS:
        names = [chosen[place % len(chosen)] for place in range(count)]
        seconds(llm, names, 4)
        prompts = min(seconds(llm, names, 2) for _ in range(3))
        whole = min(seconds(llm, names, OUTPUT + 2) for _ in range(3))
        found[f"step of {count}"] = round((whole - prompts) / OUTPUT * 1e3, 3)
        found[f"prompts of {count}"] = round(prompts * 1e3, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))

    def engine(**more: Any) -> LLM:
        begun = time.monotonic()
        llm = LLM(
            str(args.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            kv_cache_memory_bytes=16 << 30,
            **more,
        )
        print(f"{more}: started in {time.monotonic() - begun:.1f} s", flush=True)
        return llm

    llm = engine()
    results = {"no adapters": measure(llm, [None])}
    # One engine's memory at a time.
    del llm
    gc.collect()
    names = [f"a{index}" for index in range(args.adapters)]
    llm = engine(enable_lora=True, max_loras=args.adapters, max_lora_rank=args.rank)
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in enumerate(names):
            path = write_adapter(Path(folder) / name, config, args.rank, seed)
            begun = time.monotonic()
            llm.adapters.load(name, path)
            print(f"loaded an adapter in {time.monotonic() - begun:.2f} s", flush=True)
    results["none chosen"] = measure(llm, [None])
    results["all choose one"] = measure(llm, [names[0]])
    results[f"{args.adapters} in turns"] = measure(llm, list(names))
    for name, found in results.items():
        print(f"{name}: {', '.join(f'{key} {value} ms' for key, value in found.items())}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
