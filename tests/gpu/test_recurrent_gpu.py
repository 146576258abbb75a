"""Kernels of recurrent layers on a GPU at real head shapes: the reference's rows, and equal bits.

Gated DeltaNet as in Qwen3.5-9B, Mamba-2 as in Nemotron-3-Nano. The reference is the row by row form
in PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from helpers.fast_passes import require_chunks
from helpers.recurrent import params_of
from helpers.recurrent_driver import NUM_TOKENS, RecurrentDriver
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.mamba2 import triton
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.ops.model.mamba2.triton import ScanTile
from sametoken.ops.model.recurrent.rule import STATE_STRIDE

DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
RULES = {"gated delta": GatedDelta(16, 32, 128, 128, 4), "mamba2": Mamba2(64, 64, 8, 128, 4)}


@pytest.fixture(scope="module", params=RULES)
def driver(request):
    """Two layers; inputs are parts of one projection of a token."""
    rule = RULES[request.param]
    spec, bias = Recurrent(rule, DTYPE), isinstance(rule, Mamba2)
    params = [params_of(spec, layer=layer, bias=bias, device=DEVICE) for layer in range(2)]
    # A slow decay: what was folded once is seen for long.
    slow = tuple(replace(layer, A_log=layer.A_log - 3) for layer in params)
    widths = (rule.out_features, rule.conv_channels, *rule.gate_sizes)
    generator = torch.Generator(DEVICE).manual_seed(5)
    rows = torch.randn(NUM_TOKENS, sum(widths), generator=generator, device=DEVICE).to(DTYPE)
    return RecurrentDriver(spec, slow, lambda tokens: rows[tokens].split(widths, -1)[1:], DEVICE)


@pytest.fixture(scope="module")
def sequence(driver):
    return driver.sequence()


def test_rows_are_those_of_the_reference(driver, sequence):
    is_mamba2 = isinstance(driver.declared.rule, Mamba2)
    atol, states_atol = (2e-2, 1e-3) if is_mamba2 else (1e-2, 1e-4)
    driver.require_near_the_reference(sequence, atol=atol, states_atol=states_atol)


@pytest.mark.parametrize("chunk", [3, 64, 128])
@pytest.mark.parametrize("padded", [False, True])
def test_chunks_have_the_bits_of_single_rows(driver, sequence, chunk, padded):
    driver.require_chunks(sequence, chunk, padded=padded)


@pytest.mark.parametrize(("batch", "k"), [*product((1, 8, 64), (1, 3, 16)), (1, 64), (8, 5)])
def test_windows_have_the_bits_of_single_rows(driver, sequence, batch, k):
    driver.require_windows(sequence, batch, k)


def test_ragged_runs_have_the_bits_of_single_rows(driver, sequence):
    driver.require_ragged_runs(sequence)


def test_long_runs_have_the_bits_of_single_rows(driver):
    driver.require_long_runs(driver.sequence(300))


def test_a_captured_pass_has_the_bits_of_an_eager_one(driver, sequence):
    driver.require_captured(sequence)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("stride", [1, STATE_STRIDE])
def test_prompts_by_chunks_are_near_the_reference_and_have_their_bits_in_every_pass(rule, stride):
    require_chunks(Recurrent(rule, DTYPE), stride)


TILES = [
    ScanTile(64, 4, 1),
    ScanTile(64, 4, 2),
    ScanTile(32, 2, 2),
    ScanTile(32, 4, 4),
    ScanTile(16, 4, 1),
    ScanTile(16, 2, 4),
    ScanTile(8, 2, 8),
]


@pytest.mark.parametrize("driver", ["mamba2"], indirect=True)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_has_the_bits_of_the_engines(driver, sequence, tile, monkeypatch):
    monkeypatch.setattr(triton, "advance", partial(triton.advance, tile=tile))
    driver.require_chunks(sequence, 64, padded=True)
    driver.require_windows(sequence, 8, 5)
