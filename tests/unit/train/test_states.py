"""States that were extracted: read only where the target's device has memory for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.checkpoints import write_llama
from sametoken.errors import ConfigError
from sametoken.extraction.shards import (
    ExtractedStates,
    Manifest,
    RowRange,
    SequenceEntry,
    StateSource,
    write_manifest,
    write_shard,
)
from sametoken.train.compute import Compute
from sametoken.train.states import LayerStates, read_states
from sametoken.train.target import FrozenTarget, open_target


def target_in(directory: Path) -> FrozenTarget:
    files = open_target(write_llama(directory))
    compute = Compute(torch.device("cpu"), torch.float32)
    return FrozenTarget(files, compute, aux_layers=(0,), max_positions=64)


def test_states_beyond_the_memory_are_one_error(tmp_path):
    target = target_in(tmp_path)
    # No process has as many addresses.
    entry = SequenceEntry("a", "digest", 1, 2**50 - 1, True)
    extracted = SimpleNamespace(entries=[entry])
    with pytest.raises(ConfigError, match=rf"states of {2**50} tokens take .* lower max_length"):
        read_states((LayerStates(extracted, [0, 1]),), target, 2**60)


def test_sequences_that_are_not_complete_take_no_memory(tmp_path):
    """An answer that was aborted leaves what was written of it."""
    target = target_in(tmp_path / "target")
    sizes = target.config.vocab_size, target.config.hidden_size
    source = StateSource("model", "Llama", *sizes, target.config.num_layers, (0, 1), "float32")
    ranges = (RowRange(0, 0, 3), RowRange(1, 0, 40))
    ids = torch.arange(43) % sizes[0]
    tensors = {
        "hidden_states": torch.randn(43, 2, sizes[1]),
        "token_ids": ids,
        "next_token_ids": ids.clone(),
    }
    states = tmp_path / "states"
    states.mkdir()
    shard = write_shard(states, "a.safetensors", "run", ranges, tensors)
    whole, aborted = (
        SequenceEntry(*one) for one in (("a", "x", 1, 3, True), ("b", "y", 1, 40, False))
    )
    write_manifest(states, Manifest(source, True, (whole, aborted), (shard,)))
    extracted = ExtractedStates(states)
    assert extracted.entries == [whole]
    sequences, kept = read_states((LayerStates(extracted, [0, 1]),), target, 64)
    assert len(sequences) == 1
    assert kept.states.last.untyped_storage().nbytes() == 4 * sizes[1] * 4
