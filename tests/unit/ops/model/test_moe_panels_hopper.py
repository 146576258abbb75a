"""Experts of many rows in 4 bits on Hopper: their products, which are served, and compilation.

Kernels in Gluon run in Python here (``gluon_interpreter``); tests/gpu/test_quantized_gpu.py has
the bits of a chip.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.compiled import compile_launches, unused_barriers
from helpers.exact_products import assert_gated, assert_near, assert_rounded
from helpers.gluon_interpreter import interpreted
from sametoken.ops.model import moe_panels_hopper, moe_triton
from sametoken.ops.model.activation_triton import Activation
from sametoken.ops.model.gemm.int4 import elements, packed_int4
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.moe_rows_triton import RowGroups, RowTiles
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.weight import ClampedExperts, Int4Matrix

NUM_EXPERTS = 4
NOTHING = Activation("none")
SILU = Activation("silu_mul")
#: Depths do not fill the last block, but groups of 128.
FORMS = {
    "mxfp4": 288, "nvfp4": 272, "zeros": 288,
    "groups of 32": 288, "groups of 64": 320, "groups of 128": 384,
}  # fmt: skip


def stack(form: str, features: int, depth: int, dtype=torch.bfloat16):
    """Experts as the kernels read them, and their elements [E, features, depth]."""
    generator = torch.Generator().manual_seed(features)
    width = {"mxfp4": 32, "nvfp4": 16, "zeros": 32}.get(form) or int(form.split()[-1])
    panels, matrices = [], []
    for _ in range(NUM_EXPERTS):
        codes = torch.randint(16, (features, depth), generator=generator, dtype=torch.uint8)
        groups = features, -(-depth // width)
        zero = factor = None
        if form == "mxfp4":
            powers = torch.randint(118, 126, groups, generator=generator).to(torch.uint8)
            scale = powers.view(torch.float8_e8m0fnu)
        elif form == "nvfp4":
            scale = torch.rand(groups, generator=generator).to(torch.float8_e4m3fn)
            factor = torch.rand(features, generator=generator) / 4
        else:
            scale = (torch.rand(groups, generator=generator) / 16).to(dtype)
            zero = torch.full(groups, 8, dtype=torch.uint8)
            if form == "zeros":
                zero = torch.randint(17, groups, generator=generator, dtype=torch.uint8)
        matrix = Int4Matrix(packed_int4(codes, width), scale, zero, factor=factor)
        panels.append(Int4Panels.of(matrix, dtype))
        meant = elements(replace(matrix, factor=None), dtype).double()
        matrices.append(meant if factor is None else meant * factor[:, None].double())
    return Int4Panels.stacked(panels), torch.stack(matrices)


def choices(rows: int) -> torch.Tensor:
    """Of four experts: all rows choose the last, few the first, and none the second."""
    chosen = torch.full((rows, 2), 3)
    chosen[:, 1] = 2
    chosen[5, 1] = 0
    return chosen


def normal(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.fixture
def on_hopper(monkeypatch):
    """Few programs with two slots each, so both are used again."""
    monkeypatch.setattr(moe_panels_hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(moe_panels_hopper, "MULTIPROCESSORS", 3)
    monkeypatch.setattr(moe_panels_hopper, "_SLOTS", 2)


@pytest.fixture
def tiles():
    return RowTiles.of(RowGroups.of(choices(150), NUM_EXPERTS), 128)


def computed(x, panels, biases, width, tiles, activation, *, in_order, seed=0):
    out = torch.full((len(x), width), torch.nan, dtype=x.dtype)
    given = x, panels, biases, out, tiles, activation
    with interpreted(seed):
        moe_panels_hopper.product(*given, in_order=in_order)
    return out


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.bfloat16) for form in FORMS), ("zeros", torch.float16)],
)
def test_products_are_rounded_once(form, dtype, tiles, on_hopper):
    """Of tiles that rows, features and depth do not fill; results are in the order of pairs."""
    depth = FORMS[form]
    panels, matrices = stack(form, 328, depth, dtype)
    x, biases = normal(300, depth, dtype=dtype), normal(NUM_EXPERTS, 328, dtype=dtype)
    out = computed(x, panels, biases, 328, tiles, NOTHING, in_order=True)
    by_pair = choices(150).flatten()
    for row, pair in enumerate(tiles.order.tolist()):
        expert = by_pair[pair]
        given = x[row : row + 1].double(), matrices[expert], biases[expert]
        assert_rounded(out[pair : pair + 1], *given)
    for seed in (1, 2):
        again = computed(x, panels, biases, 328, tiles, NOTHING, in_order=True, seed=seed)
        assert torch.equal(again, out)


@pytest.mark.parametrize("form", FORMS)
def test_gated_products_are_made_of_plain_ones(form, tiles, on_hopper):
    panels, _ = stack(form, 2 * 144, FORMS[form])
    x, biases = normal(300, FORMS[form]), normal(NUM_EXPERTS, 2 * 144)
    plain = computed(x, panels, biases, 2 * 144, tiles, NOTHING, in_order=False)
    assert_gated(computed(x, panels, biases, 144, tiles, SILU, in_order=False), plain)
    clamped, gelu = (
        computed(x, panels, biases, 144, tiles, activation, in_order=False)
        for activation in (Activation("clamped_swiglu", 1.702, 0.5), Activation("gelu_mul"))
    )
    assert torch.equal(clamped, ReferenceKernels().clamped_swiglu(plain, 1.702, 0.5))
    gate, up = plain.double().chunk(2, 1)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert_near(gelu, exact, 16 * 2.0**-24 * up.abs())


def test_outputs_are_those_of_the_kernel_of_all_chips(on_hopper, monkeypatch):
    """In fp16, to which Triton's interpreter rounds as a chip does."""
    launch = moe_panels_hopper.product

    def run(*given, in_order):
        with interpreted():
            launch(*given, in_order=in_order)

    monkeypatch.setattr(moe_panels_hopper, "product", run)
    (gate_up, _), (down, _) = (
        stack("zeros", *size, torch.float16) for size in ((2 * 160, 288), (288, 160))
    )
    biases = [normal(NUM_EXPERTS, n, dtype=torch.float16) for n in (2 * 160, 288)]
    experts = moe_triton.StackedExperts(gate_up, down, ClampedExperts(1.702, 7.0, *biases))
    x, groups = normal(150, 288, dtype=torch.float16), RowGroups.of(choices(150), NUM_EXPERTS)
    expected = moe_triton._outputs(x, experts, groups, torch.float32, None)
    out = moe_triton._outputs_on_hopper(x, experts, groups, torch.float32)
    assert out is not None
    error = (out - expected).norm() / expected.norm()
    assert error < 2**-9


def test_other_experts_have_other_kernels(on_hopper, monkeypatch):
    x, groups = torch.zeros(150, 128).bfloat16(), RowGroups.of(choices(150), NUM_EXPERTS)
    monkeypatch.setattr(moe_panels_hopper, "product", lambda *given, in_order: None)

    def serves(gate_up, down, x=x, groups=groups):
        given = x, gate_up, down, (None, None), groups, x.dtype, SILU
        return moe_panels_hopper.outputs(*given) is not None

    gate_up, down = (stack("groups of 32", *size)[0] for size in ((256, 128), (128, 128)))
    assert serves(gate_up, down)
    for form in ("mxfp4", "nvfp4"):
        others = [stack(form, *size)[0] for size in ((256, 128), (128, 128))]
        assert serves(*others)
        assert not serves(*others, x=x.half())
    assert not serves(gate_up, down, x=x.half())
    assert not serves(gate_up, down, groups=RowGroups.of(choices(90), NUM_EXPERTS))
    assert not serves(replace(gate_up, paired=None), down)
    assert not serves(gate_up, replace(down, in_features=124))
    assert not serves(down, down)
    assert not serves(gate_up, ExpertStack(torch.zeros(4, 128, 128).bfloat16()))
    monkeypatch.setattr(moe_panels_hopper, "is_hopper", lambda device: False)
    assert not serves(gate_up, down)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    code = """
from sametoken.ops.model import moe_panels_hopper
from sametoken.ops.model.activation_triton import Activation
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.moe_rows_triton import RowGroups

moe_panels_hopper.is_hopper = lambda device: True
def stack(features, depth, width, zeros):
    blocks = -(-depth // 128)
    words = torch.zeros(5, features, 16 * blocks, dtype=torch.int32)
    lines = {0: 1, 16: 2}.get(width) or 128 // width
    scales = torch.zeros(5, blocks * lines, features, dtype=torch.int32)
    if not width:
        return Int4Panels(words, scales.view(torch.uint32), None, depth, True, False)
    if width == 16:
        factors = torch.zeros(5, features)
        return Int4Panels(words, scales, None, depth, True, False, factors=factors)
    offsets = scales if zeros else None
    return Int4Panels(words, scales, offsets, depth, False, True, paired=torch.bfloat16)
for width, dtype in ((0, torch.float32), (16, torch.bfloat16), (32, torch.bfloat16)):
    stacks = stack(512, 272, width, True), stack(272, 256, width, True)
    groups = RowGroups.of(torch.zeros(200, 2, dtype=torch.int64), 5)
    x = torch.zeros(200, 272, dtype=torch.bfloat16)
    biases = (x.new_zeros(5, 512), x.new_zeros(5, 272)) if not width else (None, None)
    follows = Activation("silu_mul") if width else Activation("clamped_swiglu", 1.7, 7.0)
    given = x, *stacks, biases, groups, dtype, follows
    assert moe_panels_hopper.outputs(*given).dtype == dtype
"""
    cache = tmp_path_factory.mktemp("panels")
    compile_launches(code, cache)
    return cache


def test_elements_stay_in_the_threads_that_multiply_them(compiled):
    kernels = [file.read_text() for file in compiled.rglob("panels_kernel.ptx")]
    assert len(kernels) == 6
    for kernel in kernels:
        products = kernel[kernel.index("wgmma") : kernel.rindex("wgmma")]
        assert "fma.rn.bf16x2" in products
        assert "shfl" not in products


def test_every_barrier_is_waited_for(compiled):
    assert not unused_barriers(compiled)
