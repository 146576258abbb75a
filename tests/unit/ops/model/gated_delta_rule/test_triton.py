"""Gated DeltaNet's kernels: tiles, and launches (tests of both rules: recurrent/test_triton.py)."""

from __future__ import annotations

import pytest
import torch

from helpers.recurrent import params_of
from helpers.recurrent_rows import DEVICE, Row, attention_rows, empty, inputs_of, run
from sametoken.ops.backend import RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule import triton
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.gated_delta_rule.triton import RuleTile, advance
from sametoken.ops.model.recurrent.rule import RawRows
from sametoken.ops.model.recurrent.runs import plan_runs


@pytest.mark.parametrize("columns", [2, 4, 8])
def test_a_tile_changes_no_bit(columns):
    """Four keys: of more, numpy adds in an order of its own."""
    spec = Recurrent(GatedDelta(1, 2, 4, 15, 4), torch.float32)
    rows = [Row(0, p, p, p < 4) for p in range(6)]
    found = []
    for tile in (RuleTile(32, 2, 4), RuleTile(columns, 4, 8)):
        cache = empty(spec, 2)
        at = attention_rows(rows, RowRuns.even(1, 6))
        mixed, *gates = inputs_of(rows, spec)
        runs, raw = plan_runs(at, cache.folded), RawRows(mixed, tuple(gates))
        found.append(advance(runs, params_of(spec, device=DEVICE), raw, cache.layer(0), tile))
    assert torch.equal(*found)


@pytest.mark.parametrize("prompt", [1, 127, 128])
def test_long_runs_alone_start_behind_their_preparation(prompt, monkeypatch):
    asked = []

    def pdl_options(tensor, early=True):
        asked.append(early)
        return {"PDL": False}

    monkeypatch.setattr(triton, "pdl_options", pdl_options)
    spec = Recurrent(GatedDelta(1, 2, 3, 5, 4), torch.float32)
    run(empty(spec, 0), [[Row(0, p, p, True) for p in range(prompt)]], prompt)
    assert asked == [prompt < 128]
