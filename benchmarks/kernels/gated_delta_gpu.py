"""Microseconds and GB/s of Gated DeltaNet's layer operation inside a CUDA graph, by tile.

    python benchmarks/kernels/gated_delta_gpu.py [--json FILE]

Qwen3.5-9B's shape: 32 value heads over 16 key heads, states of 128 x 128. A graph runs the
operation over the states of at least 24 layers, more if few slots would keep them in L2: the rule
alone, and with the preparation of its rows. A pass of w rows runs as many pending rows before them
as the last number says; without drafts (w=1) it stores a state after the fourth. GB/s counts one
read and one write of the states; 100 % is a copy of 4 GiB on the same machine. For comparison, a
kernel in the same chain only reads and writes the states.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from graph_times import replayed
from triton.runtime.errors import OutOfResources

from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule.prepare import prepare
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.gated_delta_rule.triton import RuleTile, advance, advance_prepared
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import plan_runs
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_options
from sametoken.state.caches import ModelCache

HEADS = {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128}
CHANNELS, LAYERS, REPLAYS = 8192, 24, 20
STATE_BYTES = 4 * 32 * 128 * 128
# Several times L2.
LEAST_BYTES = 256 << 20
#: None: what ships, on Hopper the Gluon walk for long runs.
TILES = (
    None,
    RuleTile(32, 2, 4),
    RuleTile(16, 4, 8),
    RuleTile(8, 4, 4),
    RuleTile(8, 4, 8),
    RuleTile(8, 4, 16),
    RuleTile(8, 2, 8),
)
WARM_UP_SECONDS = 0.3


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    rows: int
    folded: int
    prefill: bool = False

    @property
    def layers(self) -> int:
        return max(LAYERS, -(-LEAST_BYTES // (self.batch * STATE_BYTES)))


CASES = (
    *(
        Case(f"c={batch} w={rows} {folded}", batch, rows, folded)
        for batch in (1, 8, 64)
        for rows, folded in ((1, 0), (1, 1), (1, 2), (1, 3), (4, 3))
    ),
    Case("512 rows", 1, 512, 0, prefill=True),
    Case("2048 rows", 1, 2048, 0, prefill=True),
    Case("4096 rows", 1, 4096, 0, prefill=True),
    Case("2 x 512", 2, 512, 0, prefill=True),
    Case("4 x 512", 4, 512, 0, prefill=True),
)


def seconds(launch: Callable[[], object]) -> float:
    """Time one replay of a graph of ``launch``, the best of several."""
    return min(replayed(launch, REPLAYS)) / 1e3


def copy_bandwidth() -> float:
    """Measure bytes per second of a copy of 4 GiB, reads plus writes; warms up the clocks.

    It uses a kernel, because in a graph the driver's copy takes 1.5 times as long.
    """
    source = torch.ones(1 << 30, device="cuda")
    target = torch.empty_like(source)
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_UP_SECONDS:
        torch.neg(source, out=target)
        torch.cuda.synchronize()
    return 2 * source.nbytes / seconds(lambda: torch.neg(source, out=target))


@triton.jit
def _copy_kernel(states, FLOATS: tl.constexpr, PDL: tl.constexpr):
    """Prefetch some of the states, as the rule does, and write them back."""
    gdc_launch_dependents(PDL)
    at = states + tl.program_id(0).to(tl.int64) * FLOATS + tl.arange(0, FLOATS)
    values = tl.load(at, cache_modifier=".cg")
    gdc_wait(PDL)
    tl.store(at, -values)


def copy_in_place(states: torch.Tensor) -> None:
    """Copy in pieces of 4 KiB, the fastest of several sizes."""
    grid = (states.numel() // 1024,)
    _copy_kernel[grid](states, 1024, num_warps=1, **pdl_options(states))


class Layers:
    """States of many layers, and one pass over them."""

    def __init__(self, case: Case) -> None:
        self.case, drafts = case, 0 if case.prefill else case.rows - 1
        rule = GatedDelta(**HEADS, conv_kernel=4)
        self.cache = ModelCache.allocate(
            (Recurrent(rule, torch.bfloat16),) * case.layers,
            num_blocks=0,
            block_size=1,
            max_num_seqs=case.batch,
            num_drafts=drafts,
            device=torch.device("cuda"),
        )
        self.folded = self.cache.folded
        assert case.folded <= self.folded.max_pending
        slots = torch.arange(case.batch, device="cuda").repeat_interleave(case.rows)
        place = torch.arange(case.rows, device="cuda").repeat(case.batch)
        committed = place < (case.rows if case.prefill else 1)
        before = 512
        self.start = torch.full_like(self.folded.position, before)
        self.pending = torch.full_like(self.folded.num_pending, case.folded)
        positions = before + case.folded + place
        runs = RowRuns.even(case.batch, case.rows)
        if case.prefill:
            runs = RowRuns(case.batch, case.rows, None, num_short=0, max_short=0)
        self.rows = AttentionRows(positions, slots, slots, slots[None], runs, committed)
        width = CHANNELS + 4096 + 64
        projected = torch.randn(len(slots), width, device="cuda").bfloat16()
        qkv, _, b, a = projected.split((CHANNELS, 4096, 32, 32), dim=-1)
        self.raw = RawRows(qkv, (a, b))
        weight = torch.randn(4, CHANNELS, device="cuda").bfloat16()
        heads = torch.randn(2, 32, device="cuda")
        self.params = GatedDeltaParams(rule, heads[0] - 3, heads[1], weight, None)
        self.reset()

    def reset(self) -> Layers:
        """Restore the memory and the plan of the pass, so that all replays are equal."""
        generator = torch.Generator("cuda").manual_seed(0)
        states, *raw_rows = self.cache.slots
        states.zero_()
        for held in raw_rows:
            held.normal_(generator=generator)
        self.folded.position.copy_(self.start)
        self.folded.num_pending.copy_(self.pending)
        self.runs = plan_runs(self.rows, self.folded)
        return self

    def memory(self, layer: int) -> LayerMemory:
        return self.cache.layers[layer]

    def whole(self, tile: RuleTile | None) -> torch.Tensor:
        """Prepare and run the rows of every layer."""
        for layer in range(self.case.layers):
            memory = self.memory(layer)
            out = advance(self.runs, self.params, self.raw, memory, tile)
        return out

    def rule(self, tile: RuleTile | None) -> torch.Tensor:
        """Run rows of every layer that are prepared once."""
        prepared = prepare(self.runs, self.params, self.raw, self.memory(0))
        for layer in range(self.case.layers):
            memory = self.memory(layer)
            out = advance_prepared(self.runs, self.params.rule, prepared, self.raw, memory, tile)
        return out

    def copy(self) -> None:
        for layer in range(self.case.layers):
            copy_in_place(self.cache.layers[layer].states[: self.case.batch])


def require_equal_rule(layers: Layers) -> None:
    """Require that a tile changes no bit."""
    expected = layers.reset().whole(TILES[0])
    assert expected.isfinite().all()
    for tile in TILES[1:]:
        assert torch.equal(layers.reset().whole(tile), expected)


def name_of(tile: RuleTile | None) -> str:
    if tile is None:
        return "as shipped"
    return f"{tile.value_columns:3} columns, {tile.num_warps} warps, {tile.stages:2} stages"


def measured() -> dict[str, dict[str, float]]:
    """Measure seconds per layer, by operation and case."""
    table: dict[str, dict[str, float]] = {}
    require_equal_rule(Layers(Case("check", 2, 4, 3)))
    require_equal_rule(Layers(Case("check", 2, 205, 0, prefill=True)))
    for case in CASES:
        layers = Layers(case)
        launches: dict[str, Callable[[], object]] = {"the states copied in place": layers.copy}
        for tile in TILES:
            launches[name_of(tile)] = lambda layers=layers, tile=tile: layers.whole(tile)
        for tile in (None, TILES[1], TILES[4]):
            launches[f"{name_of(tile)}, rule"] = lambda layers=layers, tile=tile: layers.rule(tile)
        for name, launch in launches.items():
            try:
                table.setdefault(name, {})[case.name] = seconds(launch) / case.layers
            except OutOfResources as error:
                print(f"{name}, {case.name}: does not fit: {error}", flush=True)
        del layers, launches
        torch.cuda.empty_cache()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e9:.0f} GB/s")
    table = measured()
    print("\nus per layer\n" + " " * 42 + "".join(f"{case.name:>11}" for case in CASES))
    for name, times in table.items():
        cells = (f"{1e6 * times[c.name]:11.2f}" if c.name in times else 11 * " " for c in CASES)
        print(f"{name:42}" + "".join(cells))
    decode = [case for case in CASES if not case.prefill]
    print("\nGB/s of states, % of the copy\n" + " " * 42 + "".join(f"{c.name:>14}" for c in decode))
    for name, times in table.items():
        cells = []
        for case in decode:
            rate = 2 * case.batch * STATE_BYTES / times.get(case.name, float("inf"))
            cells.append(f"{rate / 1e9:8.0f} {100 * rate / bandwidth:4.0f}%")
        print(f"{name:42}" + "".join(cells))
    if options.json:
        figures = {"copy_bytes_per_second": bandwidth, "seconds_per_layer": table}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
