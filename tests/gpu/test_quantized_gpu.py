"""Products of quantized checkpoints on a chip: the reference, and bits at every row count."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product as cartesian

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file

from helpers.gguf_files import write_gguf
from helpers.updates import NGRAM, engine, said
from sametoken.models.load.gguf_blocks import _UNPACKED
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.nvfp4_linear import Nvfp4Linear
from sametoken.models.load.weights import Part, WeightReader
from sametoken.ops.backend import Routing
from sametoken.ops.dispatch import select_kernels
from sametoken.ops.hopper import is_hopper
from sametoken.ops.model import moe_panels_hopper
from sametoken.ops.model.gemm import int4_hopper
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.model.gemm.fp8_triton import Fp8DeviceWeight
from sametoken.ops.model.gemm.int4 import Int4Weight, elements, expanded, packed_int4
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.gemm.int4_triton import (
    Int4Config,
    Int4DeviceWeight,
    product,
)
from sametoken.ops.model.gemm.product import product as product_of_matrix
from sametoken.ops.model.gemm.triton import Scaling, tiled_product
from sametoken.ops.model.gemm.tuning import CANONICAL, GemmShape, streamed_config
from sametoken.ops.model.moe import SeparateExperts
from sametoken.ops.model.moe_gate_triton import moe_gate
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_triton import StackedExperts
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.weight import ClampedExperts, Int4Matrix, IntegerMatrix, Rounding

CUDA = torch.device("cuda")
ON_HOPPER = torch.cuda.is_available() and is_hopper(CUDA)
ROWS = (1, 2, 5, 16, 17, 33, 64, 65, 130, 300)
ROUNDINGS = {
    "row": Rounding,
    "groups": lambda: Rounding(grouped=True),
    "powers": lambda: Rounding(grouped=True, powers=True),
    "fixed": lambda: Rounding(scale=torch.tensor(0.02, device=CUDA)),
    "none": lambda: None,
}


def normal(*shape: int, seed: int = 0, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device=CUDA, generator=generator).to(dtype)


def float8_parts(by_group: bool, *shape: int):
    values = normal(*shape, seed=1, dtype=torch.float32).to(torch.float8_e4m3fn)
    groups = (*shape[:-1], -(-shape[-1] // 128)) if by_group else shape[:-1]
    scale = torch.rand(groups, device=CUDA, generator=torch.Generator("cuda").manual_seed(2))
    return values, (scale + 0.1) / shape[-1] ** 0.5


def require_row_law(weight, plain, depth: int, bound: float, dtype=torch.bfloat16) -> None:
    x = normal(max(ROWS), depth, dtype=dtype)
    whole, gated = weight.matmul(x, out_dtype=torch.float32), weight.gated_matmul(x)
    expected = plain.matmul(x[:64], out_dtype=torch.float32)
    assert (whole[:64] - expected).norm() / expected.norm() < bound
    for rows in ROWS:
        part = x[:rows].clone()
        assert torch.equal(weight.matmul(part, out_dtype=torch.float32), whole[:rows]), rows
        assert torch.equal(weight.gated_matmul(part), gated[:rows]), rows
    last = x[-1:].clone()
    assert torch.equal(weight.matmul(last, out_dtype=torch.float32), whole[-1:])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(("features", "depth"), [(6144, 4096), (400, 1544)])
def test_float8_products_have_the_row_law(features, depth, by_group, rounding):
    values, scale = float8_parts(by_group, features, depth)
    given = (values, scale, ROUNDINGS[rounding]())
    require_row_law(Fp8DeviceWeight(*given), Fp8Weight(*given), depth, 2**-7)


@pytest.mark.skipif(not ON_HOPPER, reason="these kernels are Hopper's")
@pytest.mark.parametrize(("features", "depth"), [(6144, 4096), (1008, 8208), (48, 272)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_of_float8_have_the_bits_of_more(features, depth, dtype):
    """Bias, gate and logits; NaN around activations."""
    weight = Fp8DeviceWeight(*float8_parts(False, features, depth), Rounding())
    memory = torch.full((60, depth), torch.nan, device=CUDA, dtype=dtype)
    memory[9:42] = normal(33, depth, dtype=dtype)
    bias = normal(features, seed=5, dtype=dtype)
    whole = [
        weight.matmul(memory[9:42], bias),
        weight.gated_matmul(memory[9:42]),
        weight.matmul(memory[9:42], out_dtype=torch.float32),
    ]
    assert streamed_config(GemmShape(features, depth), 33, 1) is None
    for rows in (1, 3, 8, 16, 25, 32):
        x = memory[9 : 9 + rows]
        assert streamed_config(GemmShape(features, depth), rows, 1)
        found = [weight.matmul(x, bias), weight.gated_matmul(x)]
        found.append(weight.matmul(x, out_dtype=torch.float32))
        for one, expected in zip(found, whole, strict=True):
            assert expected.isfinite().all()
            assert torch.equal(one, expected[:rows]), rows


def four_bits(features: int, depth: int, width: int, scales=torch.bfloat16, **what) -> Int4Matrix:
    generator = torch.Generator("cuda").manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 16, shape, device=CUDA, generator=generator).to(torch.uint8)

    groups = (features, depth // width)
    scale = (torch.rand(groups, device=CUDA, generator=generator) / 64).to(scales)
    factor = None
    if scales == torch.float8_e4m3fn:
        factor = torch.rand(features, device=CUDA, generator=generator)
    values, zero = packed_int4(random(features, depth), width), random(*groups)
    zero = {"e2m1": None, "symmetric": torch.full_like(zero, 8)}.get(what["codes"], zero)
    order = torch.randperm(depth, device=CUDA, generator=generator) if "order" in what else None
    return Int4Matrix(values, scale, zero, order, factor)


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize(
    ("codes", "scales", "width"),
    [
        *cartesian(("e2m1", "symmetric", "zeros"), FLOATS, (16, 32, 64, 128)),
        ("e2m1", torch.float8_e8m0fnu, 32),
        ("e2m1", torch.float8_e4m3fn, 16),
    ],
)
def test_four_bit_elements_are_rounded_once(width, scales, codes):
    """What the reference takes products of, whose elements are exact in fp32 before."""
    matrix = four_bits(1000, 2880 if width < 128 else 2944, width, scales, codes=codes)
    plain, ids = replace(matrix, factor=None), torch.tensor([7, 999, 0], device=CUDA)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = Int4DeviceWeight.of(matrix, dtype=dtype)
        assert torch.equal(weight.rows(ids), elements(matrix, dtype)[ids]), dtype
        found = weight.panels.expanded(dtype)
        unit = 2**8 if matrix.factor is not None else 1
        assert torch.equal(found * unit, elements(plain, dtype)), dtype


INT4_CONFIGS = [
    Int4Config(16),
    Int4Config(16, unroll=4, prefetch_bytes=1024),
    Int4Config(16, 128, unroll=1),
    Int4Config(32, num_stages=3),
    Int4Config(64, 128, unroll=1, num_warps=8, num_stages=3),
    Int4Config(128, unroll=1, num_stages=2),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("features", "depth", "width", "codes"),
    [
        (6144, 4096, 128, "symmetric"),
        (1536, 12288, 128, "zeros"),
        (1000, 2880, 32, "e2m1"),
        (1536, 2880, 64, "zeros"),
        (1536, 2864, 16, "e2m1"),
    ],
)
def test_four_bit_products_have_the_bits_of_the_product_of_the_elements(
    features, depth, width, codes, dtype
):
    scales = torch.float8_e4m3fn if width == 16 else torch.bfloat16
    matrix = four_bits(features, depth, width, scales, codes=codes)
    require_bits_of_the_elements(Int4DeviceWeight.of(matrix, dtype=dtype), dtype)


@pytest.mark.parametrize(
    ("features", "depth", "width", "codes", "dtype"),
    [
        (6144, 4096, 128, "symmetric", torch.bfloat16),
        (24576, 1152, 64, "zeros", torch.bfloat16),
        (1000, 2880, 32, "zeros", torch.float16),
        (70, 128, 128, "symmetric", torch.float16),
        (24576, 512, 32, "zeros", torch.bfloat16),
        (24576, 640, 32, "zeros", torch.bfloat16),
        (6144, 4096, 32, "powers", torch.bfloat16),
        (1000, 992, 32, "powers", torch.bfloat16),
        (6144, 4096, 16, "e4m3", torch.bfloat16),
        (24576, 1152, 16, "e4m3", torch.bfloat16),
        (1000, 720, 16, "e4m3", torch.bfloat16),
    ],
)
def test_elements_in_pairs_have_the_same_products(features, depth, width, codes, dtype):
    """Chunks of 256 features: whole ones, a half at the end, as many as warp groups, fewer."""
    scales = {"powers": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}.get(codes, dtype)
    codes = codes if scales is dtype else "e2m1"
    matrix = four_bits(features, depth, width, scales, codes=codes)
    weight = Int4DeviceWeight.of(matrix, dtype=dtype)
    assert weight.panels.made_by(dtype) is not None
    require_bits_of_the_elements(weight, dtype, configs=INT4_CONFIGS[:1])


@pytest.mark.skipif(not ON_HOPPER, reason="these kernels are Hopper's")
@pytest.mark.parametrize(("features", "depth"), [(1000, 2880), (40, 704), (24000, 1000)])
def test_groups_in_turns_read_no_poison_and_write_their_own(features, depth):
    """NaN around activations, and rows before and after that stay."""
    matrix = four_bits(features, depth - depth % 32, 32, codes="zeros")
    panels = Int4Panels.of(matrix, torch.bfloat16)
    plain = panels.expanded(torch.bfloat16)
    memory = torch.full((200, panels.in_features), torch.nan, device=CUDA, dtype=torch.bfloat16)
    for rows in (1, 7, 8, 9, 33, 64, 100):
        memory[9 : 9 + rows] = normal(rows, panels.in_features, seed=rows)
        x = memory[9 : 9 + rows]
        expected = product_of_matrix(CANONICAL, x.clone(), plain)
        for _ in range(3):
            assert torch.equal(int4_hopper.product(x, panels), expected), rows
        memory[9 : 9 + rows] = torch.nan


def require_bits_of_the_elements(
    weight: Int4DeviceWeight, dtype: torch.dtype, configs=INT4_CONFIGS
) -> None:
    features, depth = weight.out_features, weight.in_features
    x, plain = normal(300, depth, dtype=dtype), weight.panels.expanded(dtype)
    bias, factors = normal(features, seed=5, dtype=dtype), weight.panels.factors
    scaling = None if factors is None else Scaling(factors, None, dtype)
    for epilogue in ("logits", "silu_mul", "bias", "none"):
        own = bias if epilogue == "bias" else None
        expected = tiled_product(CANONICAL, x, plain, epilogue, own, scaling)
        assert expected.isfinite().all()
        for rows in ROWS:
            part = x[:rows].clone()
            assert torch.equal(product(part, weight.panels, epilogue, own), expected[:rows]), rows
            if int4_hopper.serves(weight.panels, dtype):
                found = int4_hopper.product(part, weight.panels, epilogue, own)
                assert torch.equal(found, expected[:rows]), rows
        for config in configs:
            found = product(x[:70], weight.panels, epilogue, own, config)
            assert torch.equal(found, expected[:70]), (epilogue, config)


@pytest.mark.parametrize(("features", "depth"), [(6144, 2048), (1536, 2864), (24576, 1152)])
def test_factors_of_sums_keep_the_row_law(features, depth):
    """Of rows that every kernel serves, the expanded matrix's tiles of rows among them."""
    weight = Int4DeviceWeight.of(four_bits(features, depth, 16, torch.float8_e4m3fn, codes="e2m1"))
    x, bias = normal(2100, depth), normal(features, seed=5)
    for product_of in (
        weight.matmul,
        weight.gated_matmul,
        partial(weight.matmul, bias=bias),
        partial(weight.matmul, out_dtype=torch.float32),
    ):
        whole = product_of(x)
        assert whole.isfinite().all()
        for rows in (1, 9, 60, 130, 384, 385, 500, 700, 1500):
            assert torch.equal(product_of(x[:rows].clone()), whole[:rows]), rows


#: Bits of a code, features of a group, dtype of scales, and whether there are minima.
BLOCKS = {
    "Q4_0": (4, 32, torch.float16, False),
    "Q4_1": (4, 32, torch.float16, True),
    "Q8_0": (8, 32, torch.float16, False),
    "Q4_K": (4, 32, torch.float32, True),
    "Q5_K": (5, 32, torch.float32, True),
    "Q6_K": (6, 16, torch.float32, False),
}


def blocks(features: int, depth: int, name: str) -> IntegerMatrix:
    """As ``gguf_blocks`` reads them: a scale in fp32 is the product of two short numbers."""
    bits, width, dtype, has_minima = BLOCKS[name]
    generator = torch.Generator("cuda").manual_seed(7)
    shape = (features, depth // width)

    def short(most: int) -> torch.Tensor:
        half = (torch.rand(shape, device=CUDA, generator=generator) / 999).half()
        if dtype == torch.float16:
            return half
        return half.float() * torch.randint(1, most, shape, device=CUDA, generator=generator)

    codes = torch.randint(0, 2**bits, (features, depth), device=CUDA, generator=generator)
    scale, minimum = short(64), -short(64)
    codes, zero = codes.to(torch.uint8), 1 << bits - 1
    return IntegerMatrix(codes, bits, scale, zero, minimum if has_minima else None)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_unpacked_as_on_a_cpu(name):
    kind = GGMLQuantizationType[name]
    raw = torch.randint(0, 256, (64, 4, GGML_QUANT_SIZES[kind][1]), dtype=torch.uint8)
    host, chip = (_UNPACKED[kind](each) for each in (raw, raw.to(CUDA)))
    for part in ("codes", "scale", "minimum"):
        wanted, found = getattr(host, part), getattr(chip, part)
        if wanted is not None:
            assert torch.equal(found.cpu().nan_to_num(), wanted.nan_to_num()), part


def test_nvfp4_is_read_as_on_a_cpu(tmp_path):
    """Quotients of scales too: a GPU may divide by a number less exactly than by a tensor."""
    stored = {
        "fc.weight_packed": torch.randint(0, 256, (512, 128), dtype=torch.uint8),
        "fc.weight_scale": (torch.rand(512, 16) * 448).to(torch.float8_e4m3fn),
        "fc.weight_global_scale": torch.tensor([1234.567]),
    }
    save_file(stored, tmp_path / "model.safetensors")
    readers = (
        WeightReader(open_weights(tmp_path), ReferenceKernels(), torch.bfloat16, device)
        for device in (torch.device("cpu"), CUDA)
    )
    wanted, found = (Nvfp4Linear().expanded(one, 256, Part("fc", 512)) for one in readers)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("name", BLOCKS)
def test_elements_of_blocks_are_rounded_once_and_are_looked_up(name):
    matrix, ids = blocks(1000, 2816, name), torch.tensor([999, 0, 7, 7, 64], device=CUDA)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = Int4DeviceWeight.of(matrix, dtype=dtype)
        assert torch.equal(weight.panels.expanded(dtype), expanded(matrix).to(dtype)), dtype
        assert torch.equal(weight.rows(ids), expanded(matrix)[ids].to(dtype)), dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BLOCKS)
def test_products_of_blocks_have_the_bits_of_the_product_of_the_elements(name, dtype):
    for shape in ((1536, 4096), (1000, 2816)):
        require_bits_of_the_elements(Int4DeviceWeight.of(blocks(*shape, name)), dtype)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_check_passes_for_blocks_on_this_chip(name):
    kernels = select_kernels(CUDA)
    shapes = ((12_288, 4096), (4096, 6144), (151_936, 4096))
    kept = [kernels.pack_integers(blocks(*shape, name), torch.bfloat16) for shape in shapes]
    counts = (1, 2, 8, 16, 24, 48, 64, 128, 192, 256, 448, 512, 2048)
    assert kernels.prove_quantized(counts, torch.bfloat16, CUDA) == len(kept)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_speculation_changes_no_bit_of_a_gguf_file(tmp_path, name):
    """Nor does keeping its bits change a token of the expanded model."""
    path = str(write_gguf(tmp_path / "model.gguf", name))
    options = {"device": "cuda", "dtype": "bfloat16"}
    wanted = said(engine(path, load_format="gguf", **options))
    for spec in (None, NGRAM):
        assert said(engine(path, spec, load_format="gguf-packed", **options)) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codes", ["e2m1", "zeros"])
def test_four_bit_products_have_the_row_law(codes, dtype):
    matrix = four_bits(1536, 4096, 64, torch.float16, codes=codes, order=True)
    weight = Int4DeviceWeight.of(matrix, dtype=dtype)
    require_row_law(weight, Int4Weight(matrix), 4096, 1e-5, dtype)


def test_a_captured_chain_of_four_bit_products_replays_the_same_bits():
    """Each kernel starts before the one in front ends; expansions reuse one workspace."""
    gate_up, down = (
        Int4DeviceWeight.of(four_bits(*shape, 128, codes="zeros"))
        for shape in ((8192, 2048), (2048, 4096))
    )

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.nn.functional.rms_norm(down.matmul(gate_up.gated_matmul(x)), (2048,))
        return x

    for rows in (1, 16, 200):
        x = normal(rows, 2048)
        expected = chain(x)
        assert expected.isfinite().all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x)
        for _ in range(5):
            out.zero_()
            graph.replay()
            assert torch.equal(out, expected)


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("rounding", ["row", "groups", "none"])
def test_float8_experts_have_the_row_law(by_group, rounding):
    count, hidden, inner = 16, 2048, 512
    how = ROUNDINGS[rounding]()
    first, second = (
        float8_parts(by_group, count, *shape) for shape in ((2 * inner, hidden), (hidden, inner))
    )
    stacked = StackedExperts(ExpertStack(*first, how), ExpertStack(*second, how))
    x, logits = normal(300, hidden, seed=4), normal(300, count, seed=5)
    chosen, weights = moe_gate(logits, Routing(4, True))
    whole = stacked(x, chosen, weights)
    assert whole.isfinite().all()
    for rows in (1, 2, 17, 64, 257):
        parts = (x[:rows].clone(), chosen[:rows].clone(), weights[:rows].clone())
        assert torch.equal(stacked(*parts), whole[:rows])


@pytest.mark.parametrize("rounding", ["groups", "powers"])
@pytest.mark.parametrize(("hidden", "inner", "top_k"), [(2048, 768, 8), (2880, 384, 3)])
def test_experts_with_scales_of_blocks_have_the_bits_of_other_kernels(
    hidden, inner, top_k, rounding
):
    """Routers have a favourite, and one expert nobody chooses; alone, a row has other kernels."""
    count, rows = 32, 3000
    drawn = torch.Generator("cuda").manual_seed(3)

    def stack(features: int, depth: int, seed: int) -> ExpertStack:
        sizes = count, -(-features // 128), -(-depth // 128)
        scales = torch.rand(sizes, device=CUDA, generator=drawn).add_(0.5).mul_(depth**-0.5)
        values = normal(count, features, depth, seed=seed).to(torch.float8_e4m3fn)
        by_row = scales.repeat_interleave(128, dim=1)[:, :features].contiguous()
        return ExpertStack(values, by_row, ROUNDINGS[rounding](), True)

    stacked = StackedExperts(stack(2 * inner, hidden, 6), stack(hidden, inner, 7))
    x, logits = normal(rows, hidden, seed=4), normal(rows, count, seed=5).float()
    logits[:, 3] += 2
    logits[:, 4] = -100
    chosen, weights = moe_gate(logits, Routing(top_k, True))
    whole = stacked(x, chosen, weights)
    assert whole.isfinite().all()
    others = (replace(one, blocks=False) for one in (stacked.gate_up, stacked.down))
    for _ in range(3):
        assert torch.equal(stacked(x, chosen, weights), whole)
    assert torch.equal(StackedExperts(*others)(x, chosen, weights), whole)
    for size in (1, 17, 300, 1100, 2999):
        parts = (x[:size].clone(), chosen[:size].clone(), weights[:size].clone())
        assert torch.equal(stacked(*parts), whole[:size])


@pytest.mark.parametrize(("e2m1", "width"), [(False, 32), (True, 32), (True, 16)])
def test_experts_in_four_bits_have_the_row_law(e2m1, width):
    count, hidden, inner = 16, 2880, 1440
    generator = torch.Generator("cuda").manual_seed(3)

    def matrices(features: int, depth: int) -> list[Int4Matrix]:
        groups = (count, features, depth // width)
        bits, zeros = (
            torch.randint(0, most, shape, device=CUDA, generator=generator).to(torch.uint8)
            for most, shape in ((256, (count, features, depth // 2)), (16, groups))
        )
        scales = 2.0 ** torch.randint(-9, -6, groups, device=CUDA, generator=generator)
        scales = scales.to(torch.float8_e8m0fnu if e2m1 and width > 16 else torch.bfloat16)
        parts = zip(bits, scales, zeros, strict=True)
        if width > 16:
            return [Int4Matrix(own, scale, None if e2m1 else zero) for own, scale, zero in parts]
        factors = torch.rand(count, features, device=CUDA, generator=generator)
        return [
            Int4Matrix(own, scale.to(torch.float8_e4m3fn), None, factor=factor)
            for (own, scale, _), factor in zip(parts, factors, strict=True)
        ]

    first, second = matrices(2 * inner, hidden), matrices(hidden, inner)
    stacked = StackedExperts(
        *(
            Int4Panels.stacked([Int4Panels.of(one, torch.bfloat16) for one in each])
            for each in (first, second)
        )
    )
    # A quarter of a row's mean to more than 128: every tile.
    x, logits = normal(700, hidden, seed=4), normal(700, count, seed=5)
    chosen, weights = moe_gate(logits, Routing(4, True))
    whole = stacked(x, chosen, weights)
    plain = ([Int4Weight(one) for one in each] for each in (first, second))
    expected = SeparateExperts(*plain)(x[:9], chosen[:9], weights[:9])
    assert (whole[:9] - expected).float().norm() / expected.float().norm() < 1e-2
    dense = SeparateExperts(
        *([Int4DeviceWeight.of(one) for one in each] for each in (first, second))
    )
    lone = chosen[:, :1].contiguous(), weights[:, :1].contiguous()
    assert torch.equal(stacked(x, *lone), dense(x, *lone))
    for rows in (1, 2, 17, 64, 257, 600):
        parts = (x[:rows].clone(), chosen[:rows].clone(), weights[:rows].clone())
        assert torch.equal(stacked(*parts), whole[:rows])


def panels_of(
    count: int, features: int, depth: int, width: int | None, *, zeros: bool, seed: int
) -> Int4Panels:
    """Experts in MXFP4 (no width), NVFP4 (16) or integers in groups of a width."""
    generator, groups = (
        torch.Generator("cuda").manual_seed(seed),
        (features, depth // (width or 32)),
    )

    def drawn(most: int, size: tuple[int, int]) -> torch.Tensor:
        return torch.randint(most, size, device=CUDA, generator=generator).to(torch.uint8)

    panels = []
    for _ in range(count):
        codes, factor = drawn(256, (features, depth // 2)), None
        zero, scale = drawn(17, groups), 2.0 ** (drawn(5, groups).float() - 9)
        if width is None:
            scale, zero = scale.to(torch.float8_e8m0fnu), None
        elif width == 16:
            scale, zero = (scale * 0.7).to(torch.float8_e4m3fn), None
            factor = torch.rand(features, device=CUDA, generator=generator)
        else:
            scale, zero = scale.bfloat16(), zero if zeros else torch.full_like(zero, 8)
        matrix = Int4Matrix(codes, scale, zero, factor=factor)
        panels.append(Int4Panels.of(matrix, torch.bfloat16))
    return Int4Panels.stacked(panels)


@pytest.mark.parametrize(
    ("hidden", "inner", "top_k", "width", "zeros"),
    [
        (2880, 2880, 4, None, False),
        (2048, 768, 8, 16, False),
        (2880, 1440, 3, 32, True),
        (2048, 704, 8, 64, False),
        (2048, 768, 8, 128, True),
    ],
)
def test_experts_of_many_rows_in_four_bits_have_the_bits_of_other_kernels(
    hidden, inner, top_k, width, zeros, monkeypatch
):
    """Routers have a favourite, and one expert nobody chooses."""
    count, rows = 16, 3000
    biases = normal(count, 2 * inner, seed=6), normal(count, hidden, seed=7)
    form = ClampedExperts(1.702, 7.0, *biases) if width is None else None
    sizes = (2 * inner, hidden), (hidden, inner)
    stacks = (panels_of(count, *size, width, zeros=zeros, seed=size[1]) for size in sizes)
    stacked = StackedExperts(*stacks, form)
    x, logits = normal(rows, hidden, seed=4), normal(rows, count, seed=5).float()
    logits[:, 3] += 2
    logits[:, 4] = -100
    chosen, weights = moe_gate(logits, Routing(top_k, True))
    whole = stacked(x, chosen, weights)
    assert whole.isfinite().all()
    for _ in range(3):
        assert torch.equal(stacked(x, chosen, weights), whole)
    for size in (1, 17, 300, 1100, 2999):
        parts = (x[:size].clone(), chosen[:size].clone(), weights[:size].clone())
        assert torch.equal(stacked(*parts), whole[:size])
    monkeypatch.setattr(moe_panels_hopper, "is_hopper", lambda device: False)
    assert torch.equal(stacked(x, chosen, weights), whole)
