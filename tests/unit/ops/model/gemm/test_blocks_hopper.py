"""Products of many float8 rows with scales of blocks: what is served, computed and compiled.

Their bits are compared in Python here (``gluon_interpreter``), and with those of Triton's kernel on
a chip, in tests/gpu/test_fp8_gpu.py.
"""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches, unused_barriers
from helpers.gluon_interpreter import interpreted
from helpers.grouped_products import GROUPED, operands, sums_of
from sametoken.ops.model.gemm import blocks_hopper, fp8, fp8_triton, streamed_hopper
from sametoken.ops.model.gemm import triton as gemm
from sametoken.ops.model.gemm.fp8_triton import Fp8DeviceWeight
from sametoken.ops.model.gemm.tuning import GemmShape
from sametoken.ops.weight import BY_ROW


@pytest.fixture
def few(monkeypatch):
    """Two programs with two slots each, so both are used again; no result is there before."""
    monkeypatch.setattr(blocks_hopper, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(blocks_hopper, "_SLOTS", {True: 2, False: 2})
    output_of = blocks_hopper.output_of
    filled = lambda *given: output_of(*given).fill_(torch.nan)  # noqa: E731
    monkeypatch.setattr(blocks_hopper, "output_of", filled)


def computed(values, matrix, scaling, epilogue="none", bias=None, seed=0):
    with interpreted(seed):
        return blocks_hopper.product(values, matrix, epilogue, bias, scaling)


@pytest.mark.parametrize(
    ("rows", "features", "depth", "epilogue"),
    [
        (70, 256, 272, "none"), (300, 130, 144, "logits"), (65, 200, 400, "bias"),
        (5, 128, 128, "none"), (2060, 16, 16, "none"),
    ],
)  # fmt: skip
def test_sums_leave_the_tensor_cores_every_128_elements(rows, features, depth, epilogue, few):
    """Rows, features and depth that fill no tile; fewer rows than one, more than a strip's."""
    given = operands(rows, features, depth)
    expected, bias = sums_of(*given), None
    if epilogue == "bias":
        bias = torch.arange(features).bfloat16() / 8
        expected += bias.float()
    out = computed(*given, epilogue, bias)
    assert out.dtype == (torch.float32 if epilogue == "logits" else torch.bfloat16)
    assert torch.equal(out, expected.to(out.dtype))


def test_gate_and_up_of_a_tile_become_one(few):
    given = operands(130, 512, 400)
    gate, up = sums_of(*given).bfloat16().float().chunk(2, dim=1)
    expected = (gate / (1 + torch.exp(-gate)) * up).bfloat16()
    assert torch.equal(computed(*given, "silu_mul"), expected)


def test_warps_take_any_turns(few):
    given = operands(150, 256, 272)
    first = computed(*given)
    for seed in range(1, 6):
        assert torch.equal(computed(*given, seed=seed), first)


@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize(
    ("depth", "rows", "features", "gated", "rounding", "blocks", "serving"),
    [
        (272, 2049, 24, False, GROUPED, True, blocks_hopper),
        (272, 2048, 24, False, GROUPED, True, streamed_hopper),
        (264, 2049, 24, False, GROUPED, True, gemm),
        (272, 2049, 24, False, GROUPED, False, gemm),
        (272, 65, 24, False, BY_ROW, True, gemm),
        (272, 65, 24, False, None, True, gemm),
        (272, 2049, 512, True, GROUPED, True, blocks_hopper),
        (272, 64, 512, True, GROUPED, True, streamed_hopper),
        (272, 2049, 384, True, GROUPED, True, gemm),
    ],
)
def test_many_rows_with_scales_of_blocks_are_served(
    depth, rows, features, gated, rounding, blocks, serving, on_hopper, monkeypatch
):
    reached = []
    products = {blocks_hopper: "product", streamed_hopper: "product", gemm: "tiled_product"}
    for module, name in products.items():
        monkeypatch.setattr(module, name, lambda *_, module=module: reached.append(module))
    monkeypatch.setattr(fp8_triton, "is_hopper", lambda device: on_hopper)
    matrix = torch.zeros(features, depth).to(torch.float8_e4m3fn)
    weight = Fp8DeviceWeight(matrix, torch.ones(features, 3), rounding, blocks)
    product = weight.gated_matmul if gated else weight.matmul
    product(torch.zeros(rows, depth, dtype=torch.float16))
    assert reached == [serving if on_hopper else gemm]


def test_rows_that_a_vocabulary_chose_are_of_no_block():
    weight = fp8.Fp8Weight(*operands(1, 256, 128)[1:2], torch.ones(256, 1), GROUPED, True)
    assert not weight.cut(torch.tensor([3, 200])).blocks


def test_the_kernel_compiles_for_any_shape(tmp_path):
    code = """
from sametoken.ops.model.gemm import blocks_hopper
from sametoken.ops.model.gemm.triton import Scaling

for rows, features, depth, epilogue in (
    (65, 256, 128, "none"), (4096, 512, 4096, "silu_mul"), (65, 24, 272, "logits"),
    (4097, 1, 272, "bias"),
):
    x, matrix = (torch.zeros(n, depth).to(torch.float8_e4m3fn) for n in (rows, features))
    scales = (torch.zeros(n, -(-depth // 128)) for n in (features, rows))
    bias = torch.zeros(features, dtype=torch.bfloat16) if epilogue == "bias" else None
    blocks_hopper.product(x, matrix, epilogue, bias, Scaling(*scales, torch.bfloat16))
"""
    compile_launches(code, tmp_path)
    assert not unused_barriers(tmp_path)
    assert blocks_hopper.serves(GemmShape(24576, 4096, "silu_mul"), 65)
