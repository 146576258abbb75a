"""A small Llama on disk, and a drafter of each common method for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.checkpoints import head_tensors, write_llama, write_speculators

#: Options of an engine whose steps, prompts and memory are small too.
SMALL = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "prefill_chunk_size": 16,
    "max_num_batched_tokens": 32,
}


def write_target(directory: Path) -> Path:
    """Write the target."""
    return write_llama(directory, max_position_embeddings=80)


def write_drafters(target: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """Write the drafters; their speculative configs by name. "self" is the target."""
    other = write_llama(directory / "other", seed=5, max_position_embeddings=80)
    head = write_speculators(directory / "head", head_tensors())
    return {
        "ngram": {"method": "ngram", "num_speculative_tokens": 5},
        "self": {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3},
        "other": {"method": "draft_model", "model": str(other), "num_speculative_tokens": 4},
        "eagle3": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3},
    }
