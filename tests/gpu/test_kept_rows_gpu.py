"""A last layer that runs sampled rows alone, on a GPU: the bits of one that runs all."""

from __future__ import annotations

import pytest
from gpu_files import (
    HYBRID_SIZES,
    OPTIONS,
    requests,
    write_files,
    write_hybrid_target,
    write_nextn_target,
    write_small_family,
)
from recorded_gpu import Recording, record, require_same_logits

from helpers.hybrids import FULL, LINEAR, hybrid_config
from sametoken.engine.load import Requested

EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}


def dense(folder):
    files = write_files(folder, "Qwen3ForCausalLM")
    return files["target"], EAGLE3 | {"model": str(files["head"])}


def hybrid(last: str):
    def write(folder):
        types = [LINEAR, FULL, LINEAR, last]
        sizes = HYBRID_SIZES | {"num_hidden_layers": 4, "layer_types": types}
        return write_hybrid_target(folder, hybrid_config("qwen3_5", **sizes)), None

    return write


def latent(folder):
    return write_nextn_target(folder, 16), None


def gemma4(folder):
    return write_small_family(folder, "gemma4"), None


TARGETS = {
    "dense": dense,
    "hybrid-full": hybrid(FULL),
    "hybrid-linear": hybrid(LINEAR),
    "latent": latent,
    "gemma4": gemma4,
}


@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_those_of_a_layer_that_runs_all_rows(name, tmp_path, monkeypatch):
    path, spec = TARGETS[name](tmp_path / "target")
    items = list(requests(16, 12))

    def logits(**options) -> Recording:
        return record(items, model=str(path), **OPTIONS | {"max_num_seqs": 7} | options)

    found = [logits(), logits(enforce_eager=True), logits(speculative_config=spec)]
    # Hopper's attention loads early what lies in KV tiles below a run's first row: such chunks
    # write some of these themselves.
    found += [logits(prefill_chunk_size=size) for size in (200, 320)]
    monkeypatch.setattr(Requested, "all_states", True)
    whole = logits(enforce_eager=True)
    for kept in found:
        require_same_logits(items, kept, whole)
