"""Lets a target answer prompts and keeps its hidden states, to train an EAGLE-3 head on.

    python benchmarks/training/states.py MODEL PROMPTS OUTDIR [--first 0] [--count 4096]

Saves the pass over the finished text that ``train eagle3 --text`` begins with. PROMPTS is what
prompts.py wrote. Answers that are complete when the time ends are kept, whatever is cut short;
run it again with other prompts and another OUTDIR, at the same time if there are idle cores,
and give ``train eagle3`` every directory with ``--states``.
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

# Prompts handed to the engine at once, for each that runs: few, and it idles at their ends.
PROMPTS_PER_SLOT = 16


def open_target(asked: argparse.Namespace) -> LLM:
    model = resolve_model(asked.model, print)
    num_layers = read_config(model).num_layers
    layers = [*Eagle3Options(aux_layers=asked.aux_layers).layer_ids(num_layers), num_layers]
    return LLM(
        str(model),
        device=asked.device,
        max_num_seqs=asked.max_num_seqs,
        max_model_len=asked.max_model_len,
        speculative_config={
            "method": "extract_hidden_states",
            "shared_storage_path": str(asked.output),
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
    parser.add_argument("--max-seconds", type=float, default=1500, help="begin no more after it")
    parser.add_argument("--max-tokens", type=int, default=320, help="of an answer")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=1088)
    parser.add_argument("--aux-layers", help="three layers, as train eagle3 takes them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    asked = parser.parse_args()
    llm, params = open_target(asked), SamplingParams(max_tokens=asked.max_tokens)
    prompts = read_prompts(asked.prompts)[asked.first : asked.first + asked.count]
    began, tokens, at_once = time.monotonic(), 0, PROMPTS_PER_SLOT * asked.max_num_seqs
    for first in range(0, len(prompts), at_once):
        some = prompts[first : first + at_once]
        outputs = llm.generate(
            [{"prompt_token_ids": prompt.token_ids} for prompt in some],
            [replace(params, temperature=p.temperature or 0.0, seed=p.seed) for p in some],
        )
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        seconds = time.monotonic() - began
        print(f"{first + len(some)} answers, {tokens} tokens, {seconds:.0f} s", flush=True)
        if seconds > asked.max_seconds:
            break


if __name__ == "__main__":
    main()
