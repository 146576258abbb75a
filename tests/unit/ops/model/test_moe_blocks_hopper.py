"""Experts in float8 with scales of blocks on Hopper: their tiles of rows, outputs and compilation.

Kernels in Gluon run in Python here (``gluon_interpreter``); tests/gpu/test_quantized_gpu.py has
the bits of a chip.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.gluon_interpreter import interpreted
from sametoken.ops.model import moe_blocks_hopper, moe_triton
from sametoken.ops.model.gemm import blocks_hopper, fp8_triton
from sametoken.ops.model.moe_rows_triton import RowGroups, RowTiles
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.weight import BY_ROW, Rounding

GROUPED = Rounding(grouped=True)


def drawn(*shape: int) -> torch.Tensor:
    """Integers that float8 holds, so that sums are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(len(shape))).float()


def stack(experts: int, features: int, depth: int) -> ExpertStack:
    blocks = 2.0 ** (drawn(experts, -(-features // 128), -(-depth // 128)) - 9)
    scales = blocks.repeat_interleave(128, dim=1)[:, :features].contiguous()
    matrices = drawn(experts, features, depth).to(torch.float8_e4m3fn)
    return ExpertStack(matrices, scales, GROUPED, True)


def choices(rows: int) -> torch.Tensor:
    """Of four experts: all rows choose the last, few the first, and none the second."""
    chosen = torch.full((rows, 2), 3)
    chosen[:, 1] = 2
    chosen[5, 1] = 0
    return chosen


@pytest.mark.parametrize("rows", [6, 64, 150])
def test_tiles_have_rows_of_one_expert(rows):
    chosen = choices(rows)
    groups = RowGroups.of(chosen, 4)
    tiles = RowTiles.of(groups, 64)
    count = int(tiles.count)
    assert count <= len(tiles.experts)
    assert torch.equal(tiles.order.long(), chosen.flatten().argsort(stable=True))
    expert_of_row, seen = chosen.flatten().sort(stable=True).values, []
    for expert, first, end in zip(
        *(one[:count].tolist() for one in (tiles.experts, tiles.firsts, tiles.ends)), strict=True
    ):
        rows_of_expert = (expert_of_row == expert).nonzero().flatten()
        assert end == int(rows_of_expert[-1]) + 1
        assert (first - int(rows_of_expert[0])) % 64 == 0
        seen += range(first, min(first + 64, end))
    assert sorted(seen) == [*range(2 * rows)]


def test_rows_are_rounded_in_the_order_of_experts():
    x, order = torch.randn(5, 300), torch.tensor([9, 0, 4, 4, 1], dtype=torch.int32)
    found = fp8_triton.rounded(x, GROUPED, order, 2)
    for got, expected in zip(found, fp8_triton.rounded(x[order.long() // 2], GROUPED), strict=True):
        assert torch.equal(got.float(), expected.float())


@pytest.fixture
def on_hopper(monkeypatch):
    """Few programs with two slots each, so both are used again; Gluon's kernels run in Python."""
    launch = blocks_hopper.expert_product

    def run(*given, in_order):
        with interpreted():
            launch(*given, in_order=in_order)

    monkeypatch.setattr(moe_blocks_hopper, "expert_product", run)
    monkeypatch.setattr(moe_blocks_hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(blocks_hopper, "MULTIPROCESSORS", 3)
    monkeypatch.setattr(blocks_hopper, "_SLOTS", {True: 2, False: 2})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [272, 128])
def test_outputs_are_those_of_the_kernel_of_all_chips(hidden, dtype, on_hopper):
    """An expert's rows fill more than a tile, or less; of one it has none."""
    rows = 150
    # Triton's interpreter rounds to float16 as a chip does.
    x = (drawn(rows, hidden) / 4).half()
    x[:, ::128] = 448 / 128  # Rounding is exact.
    gate_up, down = stack(4, 256, hidden), stack(4, hidden, 128)
    groups = RowGroups.of(choices(rows), 4)
    given = x, gate_up, down, groups, dtype
    experts = moe_triton.StackedExperts(gate_up, down)
    expected = moe_triton._outputs(x, experts, groups, dtype, None)
    out = moe_blocks_hopper.outputs(*given)
    assert out is not None
    assert out.dtype == dtype
    # Rows of down are no integers, so its sums round in one place or the other.
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert error < 2**-9


def test_other_experts_have_other_kernels(on_hopper, monkeypatch):
    x, groups = torch.zeros(150, 128).bfloat16(), RowGroups.of(choices(150), 4)
    gate_up, down = stack(4, 256, 128), stack(4, 128, 128)

    def serves(gate_up=gate_up, down=down, groups=groups):
        return moe_blocks_hopper.outputs(x, gate_up, down, groups, torch.bfloat16) is not None

    assert serves()
    assert not serves(gate_up=replace(gate_up, blocks=False))
    assert not serves(down=replace(down, rounding=BY_ROW))
    assert not serves(gate_up=stack(4, 128, 128))
    assert not serves(groups=RowGroups.of(choices(100), 4))
    monkeypatch.setattr(moe_blocks_hopper, "is_hopper", lambda device: False)
    assert not serves()


def test_kernels_of_experts_compile(tmp_path):
    code = """
from sametoken.ops.model import moe_blocks_hopper
from sametoken.ops.model.moe_rows_triton import RowGroups
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.weight import Rounding

moe_blocks_hopper.is_hopper = lambda device: True
def stack(features, depth):
    matrix = torch.zeros(5, features, depth).to(torch.float8_e4m3fn)
    return ExpertStack(matrix, torch.zeros(5, features, -(-depth // 128)), Rounding(True), True)
for rows in (200, 3000):
    groups = RowGroups.of(torch.zeros(rows, 2, dtype=torch.int64), 5)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(rows, 272, dtype=torch.bfloat16)
        stacks = stack(512, 272), stack(272, 256)
        assert moe_blocks_hopper.outputs(x, *stacks, groups, dtype).dtype == dtype
"""
    compile_launches(code, tmp_path)
