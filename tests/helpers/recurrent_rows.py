"""Passes over rows of a recurrent layer that are functions of tokens, and dead ones among them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch

from helpers.recurrent import Slots, params_of
from helpers.rows import runs_of
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.recurrent.rule import STATE_STRIDE
from sametoken.ops.model.recurrent.triton import TritonPass

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 3


def empty(
    spec: Recurrent, num_drafts: int, begin_pass=TritonPass.begin, state_stride=STATE_STRIDE
) -> Slots:
    return Slots(spec, num_drafts, begin_pass=begin_pass, device=DEVICE, state_stride=state_stride)


@dataclass(frozen=True)
class Row:
    slot: int
    position: int
    token: int
    committed: bool


def inputs_of(rows: list[Row | None], spec: Recurrent) -> tuple[torch.Tensor, ...]:
    """Raw rows as parts of a wider projection; those of dead rows are NaN."""
    sizes = (spec.rule.conv_channels, 3, *spec.rule.gate_sizes)
    raw = torch.full((len(rows), sum(sizes)), float("nan"))
    for place, row in enumerate(rows):
        if row is not None:
            generator = torch.Generator().manual_seed(row.token)
            raw[place] = torch.randn(sum(sizes), generator=generator)
    mixed, _, *gates = raw.to(DEVICE, spec.dtype).split(sizes, dim=-1)
    return mixed, *gates


def attention_rows(rows: list[Row | None], runs: RowRuns) -> AttentionRows:
    facts = [(r.slot, r.position, r.committed) if r else (SLOTS, 0, False) for r in rows]
    slots, positions, committed = torch.tensor(facts, device=DEVICE).t().contiguous().unbind(0)
    return AttentionRows(positions, slots, slots, slots[None], runs, committed.bool())


def run(
    cache: Slots, groups: list[list[Row]], window: int | None = None, num_short: int = 0
) -> list[torch.Tensor]:
    """One pass over each slot's rows, and then a dead run.

    Either all are padded to ``window`` with dead rows; or runs are ragged, a dead row at the
    end of some, an empty run and rows that have no run behind them.
    """
    if window is not None:
        padded = [[*g, *[None] * (window - len(g))] for g in [*groups, []]]
        runs, behind = RowRuns.even(len(padded), window), 0
    else:
        padded = [[*g, *[None] * (i % 2)] for i, g in enumerate([*groups, [None]])] + [[]]
        runs, behind = runs_of([*map(len, padded)], num_short, DEVICE), 2
    rows = [*(row for run in padded for row in run), *[None] * behind]
    running = cache.begin(attention_rows(rows, runs))
    params = params_of(cache.declared, limit=(0.05, 2.0), device=DEVICE)
    out = cache.run(running, 0, params, *inputs_of(rows, cache.declared))
    running.finish()
    parts, at = [], 0
    for run_rows, group in zip_longest(padded, groups, fillvalue=[]):
        parts.append(out[at : at + len(group)])
        at += len(run_rows)
        if isinstance(running, TritonPass):
            assert not out[at - len(run_rows) + len(group) : at].any()
    return parts[: len(groups)]
