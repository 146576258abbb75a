"""Convert SmolLM2's GGUF file to a Hugging Face checkpoint and write prompts, for both engines.

    python benchmarks/cross_check/checkpoint.py MODEL.gguf OUTDIR PROMPTS.jsonl [--num-each 20]

OUTDIR gets the tensors as our loader reads them, rounded once to bf16 as our engine rounds them
on a GPU, with the config and the tokenizer that the GGUF file describes. PROMPTS gets token ids
in the chat format: the first questions of GSM8K's test set, HumanEval and MT-Bench.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from sametoken.bench.datasets import load_dataset
from sametoken.models.base import ModelConfig
from sametoken.models.loader import open_checkpoint
from sametoken.text.tokenizer import Tokenizer, load_tokenizer

DATASETS = ("gsm8k", "humaneval", "mt-bench")


def config_json(config: ModelConfig) -> dict:
    """Return the transformers config; only plain Llama is supported."""
    if config.architecture != "LlamaForCausalLM":
        raise SystemExit(f"only Llama is written, not {config.architecture}")
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope["rope_theta"],
        "rope_parameters": config.rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "bfloat16",
    }


def write_checkpoint(model: Path, out: Path, tokenizer: Tokenizer) -> None:
    checkpoint = open_checkpoint(model)
    source = checkpoint.open_tensors()
    tensors = {
        name: torch.cat([chunk.to(torch.bfloat16) for chunk in source.chunks(name)])
        for name in sorted(source.names())
    }
    settings = config_json(checkpoint.config)
    ends = {key: settings[key] for key in ("bos_token_id", "eos_token_id")}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (out / "generation_config.json").write_text(json.dumps(ends) + "\n")
    tokenizer.hf.save_pretrained(out)


def prompt_lines(tokenizer: Tokenizer, stop_token_ids: list[int], num_each: int):
    for name in DATASETS:
        for item in load_dataset(name, limit=num_each):
            chat = tokenizer.apply_chat_template(item.messages, add_generation_prompt=True)
            token_ids = tokenizer.encode(chat, add_special_tokens=False)
            yield {
                "request": f"{name} {item.item_id}",
                "prompt_token_ids": list(token_ids),
                "stop_token_ids": stop_token_ids,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--num-each", type=int, default=20, help="prompts per data set")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    write_checkpoint(args.model, args.checkpoint, tokenizer)
    ends = list(open_checkpoint(args.model).config.eos_token_ids)
    lines = list(prompt_lines(tokenizer, ends, args.num_each))
    args.prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{args.checkpoint}, {len(lines)} prompts")


if __name__ == "__main__":
    main()
