"""Microseconds of a layer's experts on this GPU, by product and tile.

    python benchmarks/kernels/experts_gpu.py [--shape qwen3-30b-a3b ...] [--rows 1,64,4096]
        [--forms bf16 float8 blocks mxfp4 nvfp4 int4] [--choices even alike favoured] [--defaults]

Choices are random: even, so that experts have about equally many rows; a quarter of the rows
alike, as rows of padding are; or of favoured experts, expert i in proportion to 1 / (i + 4). A
graph runs over layers that exceed L2 in sum. ``float8`` has a scale a row, ``blocks`` one per 128 x
128, ``int4`` one per 128 in bf16. "all" is the gate and the whole mixture, by the kernels that an
engine takes; tiles are those of Triton's kernel, beside that of many rows in 4 bits on Hopper,
whose rows are copied by expert before. Rates are of the products' own operations and of the chosen
experts' bytes. A line marked ``!`` has other bits than the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from graph_times import microseconds
from torch import Tensor

from sametoken.ops.backend import Routing
from sametoken.ops.hopper import is_hopper
from sametoken.ops.model import moe_panels_hopper
from sametoken.ops.model.activation_triton import Activation
from sametoken.ops.model.gemm.fp8 import GROUP
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.moe_gate_triton import moe_gate
from sametoken.ops.model.moe_panels_hopper_kernels import ROWS
from sametoken.ops.model.moe_rows_triton import RowGroups, RowTiles, combine
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_tiles import ExpertTile
from sametoken.ops.model.moe_triton import StackedExperts, _product
from sametoken.ops.weight import Rounding


class Shape(NamedTuple):
    """Experts of a layer; those without gates square a ReLU."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    gated: bool


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, True),
    "qwen3.5-35b-a3b": Shape(256, 8, 2048, 512, True),
    "glm-4.7-flash": Shape(64, 4, 2048, 1536, True),
    "lightning-30b-a3b": Shape(128, 6, 2688, 1856, False),
    "super-120b-a12b": Shape(512, 22, 1024, 2688, False),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, True),
}
# Besides the default, which has label None.
TILES = (
    None,
    ExpertTile(16, 64, 128, 4, 3),
    ExpertTile(16, 64, 128, 4, 4, tma=True),
    ExpertTile(64, 128, 64, 8, 4, tma=True),
    ExpertTile(128, 128, 64, 8, 4, tma=True),
    ExpertTile(128, 256, 64, 8, 3, tma=True),
    ExpertTile(256, 128, 64, 8, 3, tma=True),
    ExpertTile(128, 64, 64, 4, 4, tma=True),
    ExpertTile(16, 64, 128, 4, 6),
    ExpertTile(16, 64, 256, 4, 3),
    ExpertTile(32, 64, 128, 4, 4),
    ExpertTile(32, 64, 128, 4, 4, programs=2),
    ExpertTile(64, 64, 128, 4, 3),
    ExpertTile(64, 64, 128, 4, 3, tma=True),
    ExpertTile(64, 128, 128, 8, 3, tma=True),
    ExpertTile(128, 64, 128, 8, 3, tma=True),
    ExpertTile(128, 64, 128, 4, 4, tma=True),
    ExpertTile(128, 128, 128, 8, 3, tma=True),
    ExpertTile(128, 128, 128, 8, 4, tma=True),
    ExpertTile(128, 256, 128, 8, 4, tma=True),
)
#: Of matrices in 4 bits, before a gate; else of twice the features.
PANELS_TILES = (
    ExpertTile(16, 32, 64, 4, 4),
    ExpertTile(16, 32, 64, 4, 6),
    ExpertTile(16, 64, 64, 4, 4),
    ExpertTile(16, 64, 64, 4, 3),
    ExpertTile(32, 32, 64, 4, 4),
    ExpertTile(32, 64, 64, 4, 4),
    ExpertTile(64, 32, 64, 4, 4, programs=2),
    ExpertTile(64, 64, 64, 4, 4, programs=2),
    ExpertTile(64, 64, 64, 4, 3, programs=2),
    ExpertTile(128, 32, 64, 4, 3, programs=2),
    ExpertTile(128, 64, 64, 4, 3, programs=2),
    ExpertTile(128, 64, 64, 4, 2, programs=2),
)
# Several times L2.
LEAST_BYTES = 256 << 20


Stack = ExpertStack | Int4Panels
#: In place of a tile of Triton's kernel: that of many rows in 4 bits on Hopper.
MANY_ROWS = "many rows"
Tile = ExpertTile | str | None


def panels(form: str, num_experts: int, n: int, k: int) -> Int4Panels:
    """Random experts in 4 bits."""
    blocks = -(-k // 128)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")

    words, lines = drawn(num_experts, n, 16 * blocks), (num_experts, blocks, n)
    # Powers of 2^-10; 2^-10 in bf16, twice; 2^-5 in e4m3.
    scale = {"mxfp4": 0x75757575, "int4": 0x3A803A80, "nvfp4": 0x10101010}[form]
    if form == "nvfp4":
        lines = (num_experts, 2 * blocks, n)
    scales = torch.full(lines, scale, dtype=torch.int32, device="cuda")
    if form == "mxfp4":
        return Int4Panels(words, scales.view(torch.uint32), None, k, e2m1=True, fused=False)
    if form == "nvfp4":
        factors = torch.full((num_experts, n), 2.0**-5, device="cuda")
        return Int4Panels(words, scales, None, k, e2m1=True, fused=False, factors=factors)
    return Int4Panels(words, scales, None, k, e2m1=False, fused=True, paired=torch.bfloat16)


def stacks_of(shape: Shape, form: str) -> list[tuple[Stack, Stack]]:
    """Experts of enough layers to leave L2."""
    features = 2 * shape.inner if shape.gated else shape.inner
    sizes = ((features, shape.hidden), (shape.hidden, shape.inner))

    def stack(n: int, k: int) -> Stack:
        if form in ("mxfp4", "nvfp4", "int4"):
            return panels(form, shape.num_experts, n, k)
        weight = torch.randn(shape.num_experts, n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
        if form == "bf16":
            return ExpertStack(weight)
        by_block = form == "blocks"
        groups = (k // GROUP,) if by_block else ()
        scales = torch.ones(shape.num_experts, n, *groups, device="cuda")
        rounding = Rounding(grouped=by_block)
        return ExpertStack(weight.to(torch.float8_e4m3fn), scales, rounding, by_block)

    pair = [stack(*size) for size in sizes]
    layers = 1 + LEAST_BYTES // sum(one.nbytes for one in pair)
    return [(pair[0], pair[1]), *((stack(*sizes[0]), stack(*sizes[1])) for _ in range(layers))]


def tiles_of(stack: Stack, out_features: int) -> tuple[Tile, ...]:
    """All tiles that a product may have; None is the default."""
    if isinstance(stack, Int4Panels):
        wide = 1 if stack.out_features > out_features else 2
        return (None, *(replace(tile, features=wide * tile.features) for tile in PANELS_TILES))
    if stack.blocks:
        return tuple(tile for tile in TILES if tile is None or tile.depth == GROUP)
    return TILES


def compare(
    name: str,
    stacks: Sequence[Stack],
    tiles: Sequence[Tile],
    out: Tensor,
    launch: Callable[[Stack, Tile], None],
    used: float,
) -> None:
    """Print a line for each tile; ``used`` is the part of the experts that rows chose."""
    first = None
    for tile in tiles:
        try:
            launch(stacks[0], tile)
        except Exception as error:
            print(f"  {name} {tile}: {type(error).__name__}", flush=True)
            continue
        first = out.clone() if first is None else first
        mark = " " if torch.equal(out, first) else "!"
        time = microseconds(partial(launch, tile=tile), stacks)
        operations = 2 * out.shape[0] * stacks[0].out_features * stacks[0].in_features
        per_us = operations / time / 1e6, used * stacks[0].nbytes / time / 1e6
        rates = "{:5.0f} TFLOP/s {:5.2f} TB/s".format(*per_us)
        print(f"{mark} {name} {time:8.1f} us {rates}  {tile or 'default'}", flush=True)


def logits_of(choices: str, rows: int, num_experts: int) -> Tensor:
    """Of a router: [rows, num_experts] bf16."""
    logits = -torch.rand(rows, num_experts, device="cuda").log_().neg_().log_()
    if choices == "favoured":
        logits -= (torch.arange(num_experts, device="cuda") + 4.0).log()
    if choices == "alike":
        logits[rows * 3 // 4 :] = logits[-1]
    return logits.bfloat16()


def run(
    name: str,
    form: str,
    rows: int,
    choices: str,
    stacks: list[tuple[Stack, Stack]],
    *,
    defaults: bool,
) -> None:
    shape = SHAPES[name]
    x = torch.randn(rows, shape.hidden, device="cuda", dtype=torch.bfloat16)
    logits = logits_of(choices, rows, shape.num_experts)
    routing = Routing(shape.top_k, True)
    chosen, weights = moe_gate(logits, routing)
    groups, pairs = RowGroups.of(chosen, shape.num_experts), chosen.numel()
    inner, outer = (x.new_empty(pairs, size) for size in (shape.inner, shape.hidden))
    mixed = torch.empty_like(x)
    gate = microseconds(lambda _: moe_gate(logits, routing), [None] * 9)
    group = microseconds(lambda _: RowGroups.of(chosen, shape.num_experts), [None] * 9)
    add = microseconds(lambda _: combine(outer, weights, mixed), [None] * 9)
    print(
        f"{name} {form}, {rows} rows, {choices}, at most {int(groups.counts.max())} of an expert: "
        f"gate {gate:.1f}, group {group:.1f}, combine {add:.1f} us"
    )
    layers = [StackedExperts(*pair) for pair in stacks]
    whole = microseconds(lambda one: one(x, *moe_gate(logits, routing)), layers)
    print(f"  all  {whole:8.1f} us", flush=True)
    used = len(chosen.unique()) / shape.num_experts
    first, second = ([stack[i] for stack in stacks] for i in (0, 1))
    activation = Activation("silu_mul" if shape.gated else "relu_squared")

    row_tiles, nothing = RowTiles.of(groups, ROWS.value), Activation("none")
    by_expert = x[row_tiles.order.long() // shape.top_k]

    def up(stack: Stack, tile: Tile) -> None:
        if tile == MANY_ROWS:
            given = by_expert, stack, None, inner, row_tiles, activation
            moe_panels_hopper.product(*given, in_order=False)
        else:
            _product(x, stack, None, groups, inner, shape.top_k, activation, tile)

    def down(stack: Stack, tile: Tile) -> None:
        if tile == MANY_ROWS:
            given = inner, stack, None, outer, row_tiles, nothing
            moe_panels_hopper.product(*given, in_order=True)
        else:
            _product(inner, stack, None, groups, outer, 0, nothing, tile)

    for side, of_side, launch, out in (("up  ", first, up, inner), ("down", second, down, outer)):
        tiles = (None,) if defaults else tiles_of(of_side[0], out.shape[1])
        if isinstance(of_side[0], Int4Panels) and shape.gated and is_hopper(x.device):
            tiles = (*tiles, MANY_ROWS)
        compare(side, of_side, tiles, out, launch, used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", default="1,8,64,128,512,4096")
    forms = ("bf16", "float8", "blocks", "mxfp4", "nvfp4", "int4")
    parser.add_argument("--forms", nargs="+", choices=forms, default=forms)
    kinds = ("even", "alike", "favoured")
    parser.add_argument("--choices", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--defaults", action="store_true", help="no other tiles")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for name in arguments.shape:
        for form in arguments.forms:
            stacks = stacks_of(SHAPES[name], form)
            for rows in map(int, arguments.rows.split(",")):
                for choices in arguments.choices:
                    run(name, form, rows, choices, stacks, defaults=arguments.defaults)


if __name__ == "__main__":
    main()
