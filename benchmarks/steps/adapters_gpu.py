"""The cost of LoRA adapters: decode steps and prompts of 1, 8 and 64 requests.

    python benchmarks/steps/adapters_gpu.py MODEL [--engine vllm] [--adapted-only] [--rank R]
        [--adapters A] [--json PATH]

MODEL is a directory with a config.json of a dense model; weights and adapters of all its
projections are random, so only times are meaningful. Requests have 512 tokens and come at once. Of
them none, all, or all with another adapter in turns have one; the first line has an engine without
adapters (not with --adapted-only), the others one to which they come.

vLLM draws weights of at most 0.001, whose products take less power: its prompts are too fast.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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
    names = sorted(name.rpartition(".")[2] for name in shapes)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


def seconds(llm: Any, chosen: list[Any], max_tokens: int) -> float:
    """The time of a crowd, which has an adapter for each of its requests."""
    package = importlib.import_module(type(llm).__module__.partition(".")[0])
    params = package.SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    prompts = [
        torch.randint(10, 1000, (INPUT,), generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in range(len(chosen))
    ]
    llm.reset_prefix_cache()
    begun = time.monotonic()
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        use_tqdm=False,
        lora_request=chosen,
    )
    return time.monotonic() - begun


def measure(llm: Any, chosen: list[Any]) -> dict[str, float]:
    """Milliseconds of a step, and of the prompts, by number of requests; ``chosen`` in turns."""
    found = {}
    for count in COUNTS:
        crowd = [chosen[place % len(chosen)] for place in range(count)]
        seconds(llm, crowd, 4)
        prompts = min(seconds(llm, crowd, 2) for _ in range(3))
        whole = min(seconds(llm, crowd, OUTPUT + 2) for _ in range(3))
        found[f"step of {count}"] = round((whole - prompts) / OUTPUT * 1e3, 3)
        found[f"prompts of {count}"] = round(prompts * 1e3, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", choices=["sametoken", "vllm"], default="sametoken")
    parser.add_argument("--adapted-only", action="store_true")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    package = importlib.import_module(args.engine)
    request_module = "vllm.lora.request" if args.engine == "vllm" else "sametoken"
    request_type = importlib.import_module(request_module).LoRARequest

    def engine(**more: Any) -> Any:
        begun = time.monotonic()
        llm = package.LLM(
            str(args.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            kv_cache_memory_bytes=16 << 30,
            **more,
        )
        print(f"{more}: started in {time.monotonic() - begun:.1f} s", flush=True)
        return llm

    results: dict[str, dict[str, float]] = {}

    def add(line: str, llm: Any, chosen: list[Any]) -> None:
        found = results[line] = measure(llm, chosen)
        times = (f"{key} {value} ms" for key, value in found.items())
        print(f"{line}: {', '.join(times)}", flush=True)

    if not args.adapted_only:
        llm = engine()
        add("no adapters", llm, [None])
        # One engine's memory at a time.
        del llm
        gc.collect()
    llm = engine(enable_lora=True, max_loras=args.adapters, max_lora_rank=args.rank)
    with tempfile.TemporaryDirectory() as folder:
        chosen = []
        for seed in range(args.adapters):
            path = write_adapter(Path(folder) / f"a{seed}", config, args.rank, seed)
            chosen.append(request_type(f"a{seed}", seed + 1, path))
        begun = time.monotonic()
        seconds(llm, chosen, 1)
        print(f"first requests of all adapters in {time.monotonic() - begun:.2f} s", flush=True)
        add("none chosen", llm, [None])
        add("all choose one", llm, chosen[:1])
        add(f"{args.adapters} in turns", llm, chosen)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
