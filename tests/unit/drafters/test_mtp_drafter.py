"""A multi-token-prediction module under the drafter of heads, over the target that it came with."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import VOCAB, write_checkpoint
from helpers.drafting import CPU, MAX_LEN
from helpers.head_drafting import (
    check_everything_is_accepted,
    check_from_scratch,
    check_lookahead_slots,
    head_bench,
)
from helpers.hybrids import FULL, hybrid_config, hybrid_tensors, twin_config, twin_tensors
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.loader import load_model
from sametoken.ops.reference import ReferenceKernels

OPTIONS = {
    "kernels": ReferenceKernels(),
    "dtype": torch.float32,
    "device": CPU,
    "max_positions": MAX_LEN,
}
# The bench keeps no recurrent state: tests/e2e/test_mtp_engine.py has layers with some.
DENSE = {"num_hidden_layers": 3, "layer_types": [FULL] * 3}


def load_both(directory, config: dict, tensors: dict):
    write_checkpoint(directory, config, tensors)
    target = load_model(directory, **OPTIONS)
    return target, MTPCheckpoint(directory).load(target, **OPTIONS)


def load_random(directory, kind: str, seed: int = 0):
    config = hybrid_config(kind, **DENSE)
    return load_both(directory, config, hybrid_tensors(config, seed))


@pytest.mark.parametrize(
    ("kind", "k", "temperature"),
    [("qwen3_5", 1, 0.0), ("qwen3_5", 3, 0.8), ("qwen3_5", 8, 0.0), ("qwen3_next", 2, 0.0)],
)
def test_kv_and_drafts_are_those_of_a_run_from_scratch(tmp_path, kind, k, temperature):
    target, head = load_random(tmp_path, kind, seed=k)
    bench = head_bench(target, head, k, seed=k, temperature=temperature)
    check_from_scratch(bench, head, steps=16, vocab=VOCAB)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_it_writes_no_further_than_it_says(tmp_path, k):
    target, head = load_random(tmp_path, "qwen3_5")
    check_lookahead_slots(head_bench(target, head, k, seed=5), steps=12, vocab=VOCAB)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.0), (4, 0.8), (8, 0.0)])
def test_a_module_that_is_its_target_s_twin_is_always_accepted(tmp_path, k, temperature):
    config = twin_config(**DENSE)
    target, head = load_both(tmp_path, config, twin_tensors(config, seed=k))
    bench = head_bench(target, head, k, seed=7, temperature=temperature, spoil=0.0, first_token=0)
    check_everything_is_accepted(bench, steps=45, vocab=VOCAB)
