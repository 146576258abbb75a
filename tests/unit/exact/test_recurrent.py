"""The chunked rules of the backward pass are the rules of the engine, row by row."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from helpers.recurrent import params_of
from sametoken.exact import recurrent
from sametoken.exact.functions import gradients
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.mamba2.rule import Mamba2

DELTA, MAMBA = GatedDelta(2, 4, 8, 6, 4), Mamba2(4, 6, 2, 8, 3)
#: The row functions round their weights' exponentials to fp32.
ERROR = 1e-6


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def weights_of(rule):
    declared = Recurrent(rule, torch.float32)
    weights = params_of(declared, bias=rule is MAMBA, limit=(0.1, 2.0))
    tensors = {name: getattr(weights, name) for name in names_of(weights)}
    return replace(weights, **{name: value.double() for name, value in tensors.items()})


def names_of(weights) -> list[str]:
    """The tensors that a layer has."""
    names = (one.name for one in fields(weights))
    return [name for name in names if isinstance(getattr(weights, name), torch.Tensor)]


def rows_of(rule, count: int):
    widths = (rule.conv_channels, *rule.gate_sizes)
    return [noise(count, width, seed=4 + place) for place, width in enumerate(widths)]


def row_by_row(weights, mixed, *gates):
    run_row, taps = weights.row_function(), weights.rule.conv_kernel - 1
    state = torch.zeros(weights.rule.state_shape, dtype=mixed.dtype)
    padded = torch.cat((mixed.new_zeros(taps, mixed.shape[1]), mixed))
    joined = torch.cat(gates, dim=1)
    rows = range(len(mixed))
    return torch.stack([run_row(state, padded[row : row + taps + 1], joined[row]) for row in rows])


@pytest.mark.parametrize("rule", [DELTA, MAMBA], ids=["gated delta rule", "Mamba-2"])
@pytest.mark.parametrize(("rows", "chunk"), [(1, 64), (2, 64), (150, 64), (9, 3), (5, 1)])
def test_chunks_compute_the_rule(rule, rows, chunk, monkeypatch):
    monkeypatch.setattr(recurrent, "CHUNK_ROWS", chunk)
    weights, inputs = weights_of(rule), rows_of(rule, rows)
    found, wanted = recurrent.outputs(weights, *inputs), row_by_row(weights, *inputs)
    assert found.shape == wanted.shape == (rows, rule.out_features)
    assert (found - wanted).norm() < ERROR * wanted.norm()


@pytest.mark.parametrize("rule", [DELTA, MAMBA], ids=["gated delta rule", "Mamba-2"])
def test_states_that_vanish_or_stay_have_finite_gradients(rule):
    """Decays of e^-1000 and of 1 within a chunk."""
    weights, (mixed, *gates) = weights_of(rule), rows_of(rule, 70)
    gates[0][::2], gates[0][1::2] = 1000, -1000
    own = names_of(weights)

    def formula(*inputs):
        rows, rest = inputs[: 1 + len(gates)], inputs[1 + len(gates) :]
        return recurrent.outputs(replace(weights, **dict(zip(own, rest, strict=True))), *rows)

    inputs = [mixed, *gates, *(getattr(weights, name) for name in own)]
    found = gradients(formula, inputs, [True] * len(inputs), [noise(70, rule.out_features)])
    assert all(gradient.isfinite().all() for gradient in found)
    assert found[0].any()
