"""Gated DeltaNet's rule in chunks anchored at positions, beside the shipped walk, on a GPU.

    python benchmarks/kernels/gated_delta_parallel_gpu.py

Qwen3.5-9B's shape: 32 value heads over 16 key heads, states of 128 x 128. Three forms:

- walk: the rule row by row, as shipped.
- chunks: a row is a function of the state at the last border (a position that is a multiple of C)
  and of the chunk's rows so far, by matrix products (UT transform). One tile of C rows, masked
  beyond the valid ones, serves prefill, windows and decode, so a row's bits follow from its
  position and history. States change at borders only; a pass runs the open chunk's rows again.
- resync: states at borders by the chunked form (pass 1), rows inside chunks by the walk from the
  border's state, all chunks at once (pass 2); decode walks and adds a pass 1 every C positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from gated_delta_chunks import ChunkTile, advance_chunks, link, num_chunks, walk_chunks
from gated_delta_gpu import seconds
from gated_delta_kept import KeptRows, asked_of, step
from triton.runtime.errors import OutOfResources

from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule.prepare import prepare
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.gated_delta_rule.triton import RuleTile, advance, advance_prepared
from sametoken.ops.model.recurrent.rule import RawRows
from sametoken.ops.model.recurrent.runs import plan_runs
from sametoken.state.caches import ModelCache

HEADS = {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128}
RULE = GatedDelta(**HEADS, conv_kernel=4)
STATE_BYTES = 4 * 32 * 128 * 128
LEAST_BYTES, MOST_LAYERS = 256 << 20, 48
WARM_UP_SECONDS = 0.3
MAIN = ChunkTile(16, 32, 2)
TILES = (
    MAIN,
    ChunkTile(16, 16, 1),
    ChunkTile(16, 16, 1, by_products=True),
    ChunkTile(32, 32, 4),
    ChunkTile(16, 16, 1, parts=1),
    ChunkTile(16, 16, 1, stages=3),
    ChunkTile(16, 16, 2),
    ChunkTile(16, 32, 4),
    ChunkTile(32, 16, 1),
    ChunkTile(32, 16, 2),
)
STEPS = (
    ChunkTile(16, 16, 1),
    ChunkTile(16, 32, 2),
    ChunkTile(16, 16, 1, max_registers=168),
    ChunkTile(16, 16, 1, max_registers=128),
    ChunkTile(16, 32, 4),
)
RESYNC = ChunkTile(64, 32, 4, stages=1)
LONG = ((1, 16384), (1, 2048), (8, 2048))
DECODE = ((1, 1), (8, 1), (64, 1), (1, 4), (64, 4))
WALKS = (RuleTile(32, 2), RuleTile(16, 4), RuleTile(16, 4, 128))


class Pass:
    """``count`` requests with ``pending`` rows after a border and ``rows`` of the pass each.

    Attributes:
        anchored: the pending rows are the open chunk's, for chunks of ``chunk`` rows; else none
            are pending (the walk of a step without drafts before it).
    """

    def __init__(
        self, count: int, rows: int, *, pending: tuple[int, ...] = (0,), chunk: int = 1,
        layers: int = 1, drafts: int = 0,
    ) -> None:  # fmt: skip
        self.count, self.num_rows, self.chunk, self.layers = count, rows, chunk, layers
        room = max(0, chunk - 1 + drafts)
        self.cache = ModelCache.allocate(
            (Recurrent(RULE, torch.bfloat16),) * layers, num_blocks=0, block_size=1,
            max_num_seqs=count, num_drafts=room, device=torch.device("cuda"),
        )  # fmt: skip
        generator = torch.Generator("cuda").manual_seed(0)
        states, *held = self.cache.slots
        for part in (states, *held):
            part.normal_(generator=generator)
        states *= 0.1
        before = torch.tensor([pending[i % len(pending)] for i in range(count)], device="cuda")
        slots = torch.arange(count, device="cuda").repeat_interleave(rows)
        place = torch.arange(rows, device="cuda").repeat(count)
        long = rows > 64
        committed = place < (rows if long else rows - drafts)
        start = 0 if long else 512
        folded = self.cache.folded
        folded.position.fill_(start)
        folded.num_pending.fill_(room)
        positions = start + before.repeat_interleave(rows) + place
        at = AttentionRows(
            positions, slots, slots, slots[None], RowRuns.even(count, rows), committed
        )
        self.runs = plan_runs(at, folded)
        if chunk > 1:
            done = self.runs.table[:, 4] + (rows if long else rows - drafts)
            self.runs.table[:, 5] = done // chunk * chunk
        generator.manual_seed(1)
        projected = torch.randn(len(slots), 8192 + 4096 + 64, generator=generator, device="cuda")
        qkv, _, b, a = projected.bfloat16().split((8192, 4096, 32, 32), dim=-1)
        self.raw = RawRows(qkv, (a, b))
        weight = torch.randn(4, 8192, generator=generator, device="cuda").bfloat16()
        heads = torch.randn(2, 32, generator=generator, device="cuda")
        self.params = GatedDeltaParams(RULE, heads[0] - 3, heads[1], weight, None)

    def prepared(self, layer: int = 0) -> torch.Tensor:
        return prepare(self.runs, self.params, self.raw, self.cache.layers[layer])

    def links(self, prepared: torch.Tensor, tile: ChunkTile):
        memory = self.cache.layers[0]
        return link(self.runs, RULE, prepared, len(self.raw.mixed), memory.max_pending, tile)

    def chunks(self, prepared: torch.Tensor, links, tile: ChunkTile, layer: int = 0, **options):
        memory = self.cache.layers[layer]
        return advance_chunks(self.runs, RULE, prepared, links, self.raw, memory, tile, **options)

    def whole(self, tile: ChunkTile) -> None:
        for layer in range(self.layers):
            prepared = self.prepared(layer)
            self.chunks(prepared, self.links(prepared, tile), tile, layer)

    def walk(self) -> None:
        for layer in range(self.layers):
            advance(self.runs, self.params, self.raw, self.cache.layers[layer])


def shown(name: str, launch: Callable[[], object], scale: float = 1.0) -> float:
    """Print and return microseconds, or say why there are none."""
    try:
        taken = seconds(launch) * 1e6 / scale
    except (OutOfResources, RuntimeError) as error:
        print(f"  {name:66} fails: {str(error)[:120]}", flush=True)
        return float("nan")
    print(f"  {name:66} {taken:10.2f} us", flush=True)
    return taken


def long_runs() -> None:
    """Prompts: the walk, and the parts of the chunked form."""
    for count, rows in LONG:
        print(f"\n{count} x {rows} rows, one layer")
        one = Pass(count, rows)
        walk = shown("walk, with its preparation", one.walk)
        shown("preparation alone", one.prepared)
        for tile in TILES if rows > 2048 else TILES[1:4:2]:
            case = Pass(count, rows, chunk=tile.rows)
            prepared = case.prepared()
            links = case.links(prepared, tile)
            shown(f"links {tile.name}", partial(case.links, prepared, tile))
            shown(f"scan  {tile.name}", partial(case.chunks, prepared, links, tile))
            unread = partial(case.chunks, prepared, links, tile, read=False)
            shown(f"scan without outputs  {tile.name}", unread)
            whole = shown(f"whole {tile.name}", partial(case.whole, tile))
            print(f"  {'walk / whole':66} {walk / whole:10.2f}")


def resync_passes() -> None:
    """Pass 1 without outputs and with states at borders, and pass 2 by the walk."""
    count, rows = LONG[0]
    for tile in (RESYNC,):
        print(f"\nresync every {tile.rows}, {count} x {rows} rows, one layer")
        case = Pass(count, rows, chunk=tile.rows)
        prepared = case.prepared()
        links = case.links(prepared, tile)
        chunks = num_chunks(case.runs, rows, case.cache.layers[0].max_pending, tile)
        borders = torch.zeros(chunks, 32, 128, 128, device="cuda")
        pass_1 = partial(case.chunks, prepared, links, tile, borders=borders, read=False)
        shown(f"links  {tile.name}", partial(case.links, prepared, tile))
        shown(f"pass 1 {tile.name}", pass_1)
        for walk in WALKS:
            pass_2 = partial(
                walk_chunks, RULE, prepared, borders, rows, torch.bfloat16, walk, tile.rows
            )
            shown(f"pass 2 {walk}", pass_2)
    print("\nresync at a border in decode, a layer: preparation, links and pass 1 of one chunk")
    for requests in (1, 8, 64):
        case = Pass(requests, RESYNC.rows, chunk=RESYNC.rows, layers=24)
        shown(f"{requests} requests {RESYNC.name}", partial(case.whole, RESYNC), 24)


def exact(prepared: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [rows, Hv, Dv] and the last state [Hv, Dv, Dk], row by row in fp64."""
    q, k, v, decay, beta, _ = prepared[:rows].double().split((2048, 2048, 4096, 32, 32, 16), dim=1)
    q, k = (x.view(rows, 16, 128).repeat_interleave(2, dim=1) for x in (q, k))
    v, out = v.view(rows, 32, 128), []
    state = torch.zeros(32, 128, 128, dtype=torch.float64, device="cuda")
    for t in range(rows):
        state *= decay[t, :, None, None]
        delta = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t, :, None]
        state += delta[:, :, None] * k[t][:, None, :]
        out.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(out), state


def errors(rows: int = 4096) -> None:
    """Largest and mean errors beside fp64, in parts of the largest and mean values."""
    one = Pass(1, rows)
    prepared = one.prepared()
    true, true_state = exact(prepared, rows)

    def say(name: str, out: torch.Tensor, state: torch.Tensor) -> None:
        parts = []
        for found, expected in ((out.view(rows, 32, 128), true), (state, true_state)):
            off = (found.double() - expected).abs()
            parts.append(off.max() / expected.abs().max())
            parts.append(off.mean() / expected.abs().mean())
        print(f"  {name:66} out {parts[0]:.1e} {parts[1]:.1e}  state {parts[2]:.1e} {parts[3]:.1e}")

    print(f"\nerrors after {rows} rows beside fp64 (largest, mean); outputs are rounded to bf16")
    rounded = true.bfloat16()
    memory = one.cache.layers[0]
    out = advance_prepared(one.runs, RULE, prepared, one.raw, memory, RuleTile())
    say("outputs rounded to bf16 alone", rounded, true_state)
    say("walk", out, memory.states[0].transpose(-1, -2))
    for tile in TILES:
        case = Pass(1, rows, chunk=tile.rows)
        ready = case.prepared()
        try:
            out = case.chunks(ready, case.links(ready, tile), tile)
        except (OutOfResources, RuntimeError) as error:
            print(f"  {tile.name:66} fails: {str(error)[:120]}", flush=True)
            continue
        say(tile.name, out, case.cache.layers[0].states[0])


def cut(case: Pass, tile: ChunkTile, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the state of one prompt in passes that end at ``cuts``."""
    raw, folded, memory = case.raw, case.cache.folded, case.cache.layers[0]
    folded.position.zero_()
    folded.num_pending.zero_()
    outs, first = [], 0
    for end in cuts:
        positions = torch.arange(first, end, device="cuda")
        slots = torch.zeros_like(positions)
        rows = AttentionRows(
            positions, slots, slots, slots[None], RowRuns.even(1, end - first), slots == 0
        )
        runs, border = plan_runs(rows, folded), end // tile.rows * tile.rows
        runs.table[0, 5] = (runs.table[0, 4] + end - first) // tile.rows * tile.rows
        folded.position[0], folded.num_pending[0] = border, end - border
        part = RawRows(raw.mixed[first:end], tuple(gate[first:end] for gate in raw.gates))
        prepared = prepare(runs, case.params, part, memory)
        links = link(runs, RULE, prepared, end - first, memory.max_pending, tile)
        outs.append(advance_chunks(runs, RULE, prepared, links, part, memory, tile))
        first = end
    return torch.cat(outs), memory.states[0].clone()


def require_equal_bits() -> None:
    """Passes of any size give a prompt's rows the same bits."""
    print("\nbits of 600 rows: one pass, and passes cut anywhere, single rows among them")
    for tile in TILES:
        case = Pass(1, 600, chunk=tile.rows)
        try:
            out, state = cut(case, tile, [600])
            for cuts in ([256, 600], [1, 18, 40, 100, 333, 600], [*range(1, 140), 470, 600]):
                other, last = cut(case, tile, cuts)
                same = torch.equal(out, other), torch.equal(state, last)
                print(f"  {tile.name:66} {len(cuts):4} passes {same}", flush=True)
        except (OutOfResources, RuntimeError) as error:
            print(f"  {tile.name:66} fails: {str(error)[:120]}", flush=True)


def decode_steps() -> None:
    """Steps whose open chunks' rows are run again or kept, beside the walk's."""
    for count, rows in DECODE:
        layers = min(MOST_LAYERS, max(24, -(-LEAST_BYTES // (count * STATE_BYTES))))
        print(f"\n{count} requests, {rows} rows each, {layers} layers, a layer")
        drafts = rows - 1
        walked = Pass(count, rows, pending=(drafts,), layers=layers, drafts=drafts)
        shown("walk, with its preparation (and all drafts folded)", walked.walk, layers)
        tile = TILES[1]
        case = Pass(count, rows, pending=tuple(range(16)), chunk=16, layers=layers, drafts=drafts)
        shown(f"rows run again {tile.name}", partial(case.whole, tile), layers)
        for opened in ((0,), (8,), (15,)) if count == 1 else (tuple(range(17 - rows)),):
            kept_steps(count, rows, layers, opened)


def kept_steps(count: int, rows: int, layers: int, opened: tuple[int, ...]) -> None:
    """Steps of ``rows`` rows behind open chunks of ``opened`` rows, those kept."""
    opened = tuple(min(one, 16 - rows) for one in opened)
    case = Pass(count, rows, layers=layers)
    held = torch.tensor([opened[i % len(opened)] for i in range(count)] + [0], device="cuda")
    kept = [KeptRows.of(RULE, count + 1, 16, "cuda") for _ in range(layers)]
    for one in kept:
        one.keys.normal_()
        one.targets.normal_()
    out = torch.empty(count * rows, RULE.out_features, device="cuda", dtype=torch.bfloat16)
    ready, room = case.prepared(), case.cache.layers[0].max_pending
    asked = asked_of(RULE, ready)

    def run(tile: ChunkTile, again: bool) -> None:
        for layer in range(layers):
            prepared = case.prepared(layer) if again else ready
            step(case.runs, RULE, prepared, asked, held, kept[layer], out, room, tile)

    for tile in STEPS:
        name = f"rows kept, {opened[0]}..{opened[-1]} open {tile.name}"
        shown(name, partial(run, tile, True), layers)
    shown("   without its preparation", partial(run, STEPS[0], False), layers)


def kept_rows_are_those_of_a_scan() -> None:
    """Whether steps that keep rows have the bits of the scan, and how far they are off."""
    case, tile = Pass(1, 600, chunk=16), ChunkTile(16, 16, 1)
    expected, state = cut(case, tile, [600])
    kept = KeptRows.of(RULE, 2, 16, "cuda")
    held = torch.zeros(2, dtype=torch.int64, device="cuda")
    out = torch.empty(1, RULE.out_features, device="cuda", dtype=torch.bfloat16)
    walked, outs = Pass(1, 600), []
    folded, memory = walked.cache.folded, walked.cache.layers[0]
    folded.position.zero_()
    for at in range(600):
        positions = torch.full((1,), at, device="cuda")
        slots = torch.zeros_like(positions)
        rows = AttentionRows(positions, slots, slots, slots[None], RowRuns.even(1, 1), slots == 0)
        runs = plan_runs(rows, folded)
        part = RawRows(
            case.raw.mixed[at : at + 1], tuple(gate[at : at + 1] for gate in case.raw.gates)
        )
        prepared = prepare(runs, case.params, part, memory)
        # The walk keeps the history.
        advance_prepared(runs, RULE, prepared, part, memory, RuleTile())
        asked = asked_of(RULE, prepared)
        kept.keys[0, :, at % 16] = asked[0, :, : 2 * 128]
        step(runs, RULE, prepared, asked, held, kept, out, memory.max_pending, tile)
        held[0] = (at + 1) % 16
        outs.append(out.clone())
    found = torch.cat(outs)
    print("\nsteps that keep rows beside the scan: equal outputs, equal states, largest difference")
    same = torch.equal(found, expected), torch.equal(kept.states[0], state)
    print(f"  {same} {(found.float() - expected.float()).abs().max().item():.1e}")


def main() -> None:
    source = torch.ones(1 << 28, device="cuda")
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_UP_SECONDS:
        torch.neg(source)
        torch.cuda.synchronize()
    del source
    print(torch.cuda.get_device_name())
    parts = (
        kept_rows_are_those_of_a_scan, require_equal_bits, errors, decode_steps, long_runs,
        resync_passes,
    )  # fmt: skip
    for part in parts:
        part()
        torch.cuda.empty_cache()
        print(f"-- {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
