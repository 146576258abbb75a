"""Answer prompts with a target and save its hidden states, to train an EAGLE-3 head.

    python benchmarks/training/states.py MODEL PROMPTS OUTDIR [--first 0] [--count 4096]

Replaces the target's pass over the text in ``train eagle3 --text``. PROMPTS is the output of
prompts.py. Answers complete before the time limit are kept; run it again with other prompts and
another OUTDIR, in parallel if cores are idle, and give ``train eagle3`` every directory with
``--states``.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from sametoken import LLM, SamplingParams
from sametoken.models.loader import read_config
from sametoken.models.names import resolve_model
from sametoken.train.generate import read_prompts
from sametoken.train.options import Eagle3Options

# Prompts per call and running request; with fewer the engine idles at the end of each call.
PROMPTS_PER_SLOT = 16


def open_target(args: argparse.Namespace) -> LLM:
    model = resolve_model(args.model, print)
    num_layers = read_config(model).num_layers
    layers = [*Eagle3Options(aux_layers=args.aux_layers).layer_ids(num_layers), num_layers]
    return LLM(
        str(model),
        device=args.device,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        speculative_config={
            "method": "extract_hidden_states",
            "shared_storage_path": str(args.output),
            "eagle_aux_hidden_state_layer_ids": layers,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="checkpoint, GGUF file or short name")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--first", type=int, default=0, help="prompts to skip")
    parser.add_argument("--count", type=int, default=4096, help="prompts to answer")
    parser.add_argument(
        "--max-seconds", type=float, default=1500, help="seconds after which no prompts are started"
    )
    parser.add_argument("--max-tokens", type=int, default=320, help="maximum tokens per answer")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=1088)
    parser.add_argument("--aux-layers", help="three layers, as train eagle3 takes them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    llm, params = open_target(args), SamplingParams(max_tokens=args.max_tokens)
    prompts = read_prompts(args.prompts)[args.first : args.first + args.count]
    began, tokens, at_once = time.monotonic(), 0, PROMPTS_PER_SLOT * args.max_num_seqs
    for first in range(0, len(prompts), at_once):
        some = prompts[first : first + at_once]
        outputs = llm.generate(
            [{"prompt_token_ids": prompt.token_ids} for prompt in some],
            [replace(params, temperature=p.temperature or 0.0, seed=p.seed) for p in some],
        )
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        seconds = time.monotonic() - began
        print(f"{first + len(some)} answers, {tokens} tokens, {seconds:.0f} s", flush=True)
        if seconds > args.max_seconds:
            break


if __name__ == "__main__":
    main()
