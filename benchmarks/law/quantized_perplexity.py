"""Perplexity on GSM8K of one model in bf16 and in each way of quantizing it.

    python benchmarks/law/quantized_perplexity.py MODEL.gguf CHECKPOINT OUTDIR [--device cpu]

CHECKPOINT is the same model in bf16, as ``benchmarks/cross_check/checkpoint.py`` writes it; copies
quantized as by ``sametoken quantize`` go to OUTDIR. Text and windows are those of
``perplexity_gpu.py``. On a CPU the file is also run in its own bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from perplexity_gpu import ours, read_windows

from sametoken.models.quantize import SCHEMES, quantize_checkpoint


def sides(
    model: Path, plain: Path, directory: Path, device: str
) -> Iterator[tuple[str, Path, str]]:
    """A name, a checkpoint and its load format, one after the other."""
    yield "bf16", plain, "auto"
    if device == "cpu":
        yield "GGUF in its bits", model, "gguf-packed"
    for scheme in SCHEMES:
        quantize_checkpoint(plain, directory / scheme, scheme)
        yield scheme, directory / scheme, "auto"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    windows, plain = read_windows(args.model), None
    for name, path, load_format in sides(args.model, args.checkpoint, args.directory, args.device):
        found = ours(path, windows, args.device, "bfloat16", load_format)
        plain = plain or found
        print(f"{name:20} {found:8.4f} {found / plain - 1:+8.2%}", flush=True)


if __name__ == "__main__":
    main()
