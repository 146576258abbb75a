"""Microseconds of Mamba-2's layer operation inside a CUDA graph, by tile.

    python benchmarks/kernels/mamba2_gpu.py [--shape nano|super]

Nano's shape (64 heads of 64 in 8 groups over a state of 128) or Super's (128 heads). A graph runs
the operation over the states of enough layers to leave L2. A pass of w rows runs as many pending
rows before them as the last number says; without drafts (w=1) it stores a state after the fourth.
% is one read and one write of the states against a copy of them, which each tile is timed beside.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from graph_times import microseconds

from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.mamba2.rule import Mamba2, Mamba2Params
from sametoken.ops.model.mamba2.triton import ScanTile, advance
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import plan_runs
from sametoken.state.caches import ModelCache

NANO = Mamba2(num_heads=64, head_dim=64, num_groups=8, state_dim=128, conv_kernel=4)
SHAPES = {"nano": NANO, "super": replace(NANO, num_heads=128)}
TILES = (
    None,
    ScanTile(64, 4, 1),
    ScanTile(64, 4, 2),
    ScanTile(32, 2, 2),
    ScanTile(32, 4, 4),
    ScanTile(16, 2, 4),
)
# Several times L2.
LEAST_BYTES = 256 << 20
BEFORE = 512


@dataclass(frozen=True)
class Case:
    """Requests, the rows of each, their pending rows, and whether the rows are a prompt's."""

    batch: int
    rows: int
    folded: int = 0
    prefill: bool = False

    @property
    def name(self) -> str:
        """As in the table's head."""
        return (
            f"{self.batch} x {self.rows}"
            if self.prefill
            else f"c={self.batch} w={self.rows} {self.folded}"
        )


CASES = (
    *(
        Case(batch, rows, folded)
        for batch in (1, 8, 64)
        for rows, folded in ((1, 0), (1, 1), (1, 2), (1, 3), (6, 5))
    ),
    Case(1, 65, 64),
    Case(1, 2048, prefill=True),
    Case(4, 512, prefill=True),
)


def layers_of(rule: Mamba2, case: Case) -> ModelCache:
    """Zero states of enough layers."""
    bytes_per_layer = (case.batch + 1) * 4 * rule.out_features * rule.state_dim
    declared = Recurrent(rule, torch.bfloat16)
    return ModelCache.allocate(
        (declared,) * max(2, -(-LEAST_BYTES // bytes_per_layer)),
        num_blocks=0,
        block_size=1,
        max_num_seqs=case.batch,
        num_drafts=0 if case.prefill else case.rows - 1,
        device=torch.device("cuda"),
    )


def planned(cache: ModelCache, case: Case):
    """The plan of a pass in which every slot folds its pending rows."""
    assert cache.folded is not None
    assert case.folded <= cache.folded.max_pending
    cache.folded.position.fill_(BEFORE)
    cache.folded.num_pending.fill_(case.folded)
    slots = torch.arange(case.batch, device="cuda").repeat_interleave(case.rows)
    place = torch.arange(case.rows, device="cuda").repeat(case.batch)
    committed = place < (case.rows if case.prefill else 1)
    positions, runs = BEFORE + case.folded + place, RowRuns.even(case.batch, case.rows)
    rows = AttentionRows(positions, slots, slots, slots[None], runs, committed)
    return plan_runs(rows, cache.folded)


def params_of(rule: Mamba2) -> Mamba2Params:
    heads = torch.randn(3, rule.num_heads, device="cuda")
    weight = torch.randn(rule.conv_kernel, rule.conv_channels, device="cuda").bfloat16()
    return Mamba2Params(rule, heads[0] - 3, heads[1], heads[2], weight, weight[0].clone())


def time_case(rule: Mamba2, params: Mamba2Params, case: Case) -> dict[str, float]:
    """Microseconds of a layer, by tile; and of its states copied in place."""
    cache, count = layers_of(rule, case), case.batch * case.rows
    plan = planned(cache, case)
    widths = (rule.out_features, rule.conv_channels, rule.num_heads)
    projected = torch.randn(count, sum(widths), device="cuda").bfloat16()
    _, mixed, dt = projected.split(widths, dim=-1)
    raw = RawRows(mixed, (dt,))

    def copied(layer: LayerMemory) -> None:
        states = layer.states[: case.batch]
        torch.neg(states, out=states)

    times = {"the states copied in place": microseconds(copied, cache.layers)}
    for tile in TILES:

        def run(layer: LayerMemory, tile: ScanTile | None = tile) -> None:
            advance(plan, params, raw, layer, tile)

        times[name_of(tile)] = microseconds(run, cache.layers)
    return times


def name_of(tile: ScanTile | None) -> str:
    if tile is None:
        return "the engine's choice"
    return f"{tile.rows} rows, {tile.num_warps} warps, {tile.ahead} ahead"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="nano")
    rule = SHAPES[parser.parse_args().shape]
    params = params_of(rule)
    table = {case: time_case(rule, params, case) for case in CASES}
    print(f"{torch.cuda.get_device_name()}, {rule}\nus per layer (% of the copy)")
    print(" " * 28 + "".join(f"{case.name:>16}" for case in CASES))
    for name in table[CASES[0]]:
        cells = []
        for times in table.values():
            share = 100 * times["the states copied in place"] / times[name]
            cells.append(f"{times[name]:9.2f} {share:4.0f}% ")
        print(f"{name:28}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
