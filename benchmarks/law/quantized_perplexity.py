"""Perplexity on GSM8K of one model in bf16 and in each way of quantizing it.

    python benchmarks/law/quantized_perplexity.py MODEL.gguf OUTDIR [--device cpu]

The GGUF file's weights are written to OUTDIR/bf16 as a Hugging Face checkpoint, and quantized from
there with ``sametoken quantize``. Text and windows are those of ``perplexity_gpu.py``. On a CPU the
file is also run in its own bits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from perplexity_gpu import ours, read_windows
from safetensors.torch import save_file

from sametoken.models.load.gguf_checkpoint import GGUFCheckpoint
from sametoken.models.quantize import SCHEMES, quantize_checkpoint


def write_checkpoint(model: Path, directory: Path) -> Path:
    """The weights of a Llama's GGUF file in bf16, under Hugging Face names."""
    checkpoint = GGUFCheckpoint(model)
    source, config = checkpoint.open_tensors(), checkpoint.config
    tensors = {name: torch.cat([*source.chunks(name)]).bfloat16() for name in source.names()}
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    values = {
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
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": dict(config.rope),
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def sides(model: Path, directory: Path, device: str) -> Iterator[tuple[str, Path, str]]:
    """A name, a checkpoint and its load format, one after the other."""
    plain = write_checkpoint(model, directory / "bf16")
    yield "bf16", plain, "auto"
    if device == "cpu":
        yield "GGUF in its bits", model, "gguf-packed"
    for scheme in SCHEMES:
        quantize_checkpoint(plain, directory / scheme, scheme)
        yield scheme, directory / scheme, "auto"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    windows, plain = read_windows(args.model), None
    for name, path, load_format in sides(args.model, args.directory, args.device):
        found = ours(path, windows, args.device, "bfloat16", load_format)
        plain = plain or found
        print(f"{name:20} {found:8.4f} {found / plain - 1:+8.2%}", flush=True)


if __name__ == "__main__":
    main()
