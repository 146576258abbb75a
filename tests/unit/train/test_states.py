"""States that were extracted: read only where the target's device has memory for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.checkpoints import write_llama
from sametoken.errors import ConfigError
from sametoken.extraction.shards import SequenceEntry
from sametoken.train.compute import Compute
from sametoken.train.states import LayerStates, read_states
from sametoken.train.target import FrozenTarget, open_target


def test_states_beyond_the_memory_are_one_error(tmp_path):
    compute = Compute(torch.device("cpu"), torch.float32)
    files = open_target(write_llama(tmp_path))
    target = FrozenTarget(files, compute, aux_layers=(0,), max_positions=64)
    # No process has as many addresses.
    entry = SequenceEntry("a", "digest", 1, 2**50 - 1, True)
    extracted = SimpleNamespace(manifest=SimpleNamespace(sequences=(entry,)))
    with pytest.raises(ConfigError, match=rf"states of {2**50} tokens take .* lower max_length"):
        read_states((LayerStates(extracted, [0, 1]),), target, 2**60)
