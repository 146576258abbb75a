"""Routing and experts: Triton against the reference, and rows that know nothing of each other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.errors import UnsupportedError
from sametoken.ops.backend import Routing
from sametoken.ops.model import activation, moe_rows_triton
from sametoken.ops.model import moe as reference
from sametoken.ops.model import moe_triton as experts
from sametoken.ops.model.gemm import fp8
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.model.gemm.fp8_triton import Fp8DeviceWeight
from sametoken.ops.model.gemm.int4 import Int4Weight, packed_int4
from sametoken.ops.model.gemm.int4_triton import Int4DeviceWeight
from sametoken.ops.model.low_rank import Room, RowAdapters
from sametoken.ops.model.low_rank_experts import ExpertSizes
from sametoken.ops.model.low_rank_experts_triton import AdaptedStackedExperts
from sametoken.ops.model.moe import SeparateExperts
from sametoken.ops.model.moe_gate_triton import moe_gate
from sametoken.ops.model.moe_rows_triton import RowGroups
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_tiles import ExpertTile
from sametoken.ops.model.moe_triton import StackedExperts
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import _stacked as stacked
from sametoken.ops.weight import ClampedExperts, GeluExperts, Int4Matrix, Rounding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ReferenceKernels()


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("rows", "count", "top_k"), [(1, 4, 2), (5, 7, 3), (3, 1, 1), (2, 6, 6)])
def test_route(rows, count, top_k, normalise):
    logits = noise(rows, count, seed=count)
    chosen, weights = moe_gate(logits, Routing(top_k, normalise))
    expected, expected_weights = reference.moe_gate(logits, Routing(top_k, normalise))
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-6)
    alone = moe_gate(logits[-1:].clone(), Routing(top_k, normalise))
    assert torch.equal(alone[0], chosen[-1:])
    assert torch.equal(alone[1], weights[-1:])


@pytest.mark.parametrize("route", [moe_gate, reference.moe_gate])
def test_ids_are_written_where_they_are_wanted(route):
    logits, memory = noise(5, 7, seed=1), torch.full((2, 9, 3), -1, device=DEVICE)
    out = memory[1, 2:7]
    chosen, weights = route(logits, Routing(3, True), None, out)
    expected, expected_weights = route(logits, Routing(3, True))
    assert chosen.data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)
    assert torch.equal(weights, expected_weights)
    memory[1, 2:7] = -1
    assert memory.eq(-1).all()


@pytest.mark.parametrize(
    ("count", "routing"),
    [
        (7, Routing(3, normalise=True, scoring="sigmoid", scale=2.5)),
        (12, Routing(4, True, "sigmoid", num_groups=4, top_groups=2, group_best=2, scale=1.5)),
        (12, Routing(3, normalise=False, num_groups=3, top_groups=1)),
    ],
)
def test_the_bias_chooses_and_does_not_weigh(count, routing):
    logits, bias = noise(6, count, seed=1), noise(count, seed=2)
    chosen, weights = moe_gate(logits, routing, bias)
    expected, expected_weights = reference.moe_gate(logits, routing, bias)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-6)
    for row in range(len(logits)):
        ids, of_ids = naive_gate(logits[row].tolist(), bias.tolist(), routing)
        assert chosen[row].tolist() == ids
        assert weights[row].tolist() == pytest.approx(of_ids, rel=1e-5)


def naive_gate(
    logits: list[float], bias: list[float], routing: Routing
) -> tuple[list[int], list[float]]:
    """DeepSeek's gate for one row, in Python's floats."""
    powers = [math.exp(logit) for logit in logits]
    softmax = [power / sum(powers) for power in powers]
    scores = [p / (1 + p) for p in powers] if routing.scoring == "sigmoid" else softmax
    ranked = [score + shift for score, shift in zip(scores, bias, strict=True)]
    size = len(logits) // routing.num_groups
    groups = [ranked[first : first + size] for first in range(0, len(logits), size)]
    best = [sum(sorted(group)[-routing.group_best :]) for group in groups]
    eligible = sorted(range(routing.num_groups), key=lambda group: -best[group])
    eligible = eligible[: routing.top_groups]
    ids = [i for i in range(len(logits)) if i // size in eligible]
    ids = sorted(ids, key=lambda i: -ranked[i])[: routing.top_k]
    total = sum(scores[i] for i in ids) if routing.normalise else 1.0
    return ids, [scores[i] / total * routing.scale for i in ids]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_of_equal_probabilities_the_lowest_id_wins_and_nan_names_experts_that_exist():
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, [torch.nan] * 5], device=DEVICE)
    chosen, _ = moe_gate(logits, Routing(4, True))
    assert chosen[:2].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert ((chosen[2] >= 0) & (chosen[2] < 5)).all()


def test_weights_are_rounded_to_the_dtype_of_the_logits():
    logits = noise(3, 9, seed=1, dtype=torch.float16)
    _, weights = moe_gate(logits, Routing(4, True))
    assert torch.equal(weights.half().float(), weights)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_of_the_reference_routes_alike_in_every_company(scoring):
    """Odd numbers of experts: the rest of a vectorised loop is computed by other code."""
    for count in (4, 5, 11):
        logits = noise(9, count, seed=count).cpu()
        routing = Routing(2, True, scoring)
        _, weights = reference.moe_gate(logits, routing)
        alone = [reference.moe_gate(row[None], routing)[1] for row in logits]
        assert torch.equal(torch.cat(alone), weights)


def stack_of(gate_up: torch.Tensor, down: torch.Tensor, form=None) -> StackedExperts:
    return StackedExperts(ExpertStack(gate_up), ExpertStack(down), form)


def routed(rows: int, hidden: int, count: int, top_k: int = 2, dtype=torch.float32):
    """Rows, and the experts that they choose with weights."""
    x, logits = noise(rows, hidden, seed=3, dtype=dtype), noise(rows, count, seed=4, dtype=dtype)
    return x, *moe_gate(logits, Routing(top_k, True))


def require_bits(stack: StackedExperts, x, chosen, weights, whole: torch.Tensor) -> None:
    """A row alone has the bits that it has in the whole, pairs have them that are no groups, and
    rows without an adapter."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(moe_rows_triton, "_LONE_PAIRS", math.inf)
        assert torch.equal(stack(x, chosen, weights), whole)
    alone = stack(x[-1:].clone(), chosen[-1:].clone(), weights[-1:].clone())
    assert torch.equal(alone, whole[-1:])
    inner, rows = stack.down.in_features, RowAdapters()
    parts = (inner,) * (stack.gate_up.out_features // inner)
    sizes = ExpertSizes(stack.num_experts, stack.down.out_features, parts)
    adapted = AdaptedStackedExperts.of(stack, sizes, Room(1, 1, x.dtype, x.device), rows)
    rows.begin(torch.zeros(x.shape[0], dtype=torch.int64, device=x.device))
    assert torch.equal(adapted(x, chosen, weights), whole)


def matrices(count: int, hidden: int, inner: int, dtype: torch.dtype):
    return (
        noise(count, 2 * inner, hidden, seed=1, dtype=dtype) / hidden**0.5,
        noise(count, hidden, inner, seed=2, dtype=dtype) / inner**0.5,
    )


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "hidden", "inner", "gated"),
    [
        (1, 5, 2, 16, 24, True),
        (7, 3, 2, 33, 20, True),
        (40, 2, 1, 40, 70, True),
        (9, 4, 2, 33, 20, False),
        (2, 33, 2, 33, 20, True),
    ],
)
def test_mix(rows, count, top_k, hidden, inner, gated, dtype):
    """More rows than a tile has, experts that nobody chose, pairs of which each is alone, sizes off
    every tile."""
    gate_up, down = matrices(count, hidden, inner, dtype)
    if not gated:
        gate_up = gate_up[:, :inner].contiguous()
    x, chosen, weights = routed(rows, hidden, count, top_k, dtype)
    stacked = stack_of(gate_up, down)
    actual = experts.moe_forward(x, stacked, chosen, weights)
    separate = SeparateExperts(*([KERNELS.pack(w.cpu()) for w in each] for each in (gate_up, down)))
    expected = separate(x.cpu(), chosen.cpu(), weights.cpu())
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)
    beside = noise(rows, hidden, seed=6, dtype=dtype)
    both = experts.moe_forward(x, stacked, chosen, weights, beside=beside)
    assert torch.equal(both, actual + beside)
    both = separate(x.cpu(), chosen.cpu(), weights.cpu(), beside=beside.cpu())
    assert torch.equal(both, expected + beside.cpu())
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    moved = experts.moe_forward(x[order], stacked, chosen[order], weights[order])
    assert torch.equal(moved, actual[order])
    require_bits(stacked, x, chosen, weights, actual)


def clamped_of(count: int, hidden: int, inner: int, dtype: torch.dtype) -> ClampedExperts:
    biases = (noise(count, size, seed=9, dtype=dtype) for size in (2 * inner, hidden))
    return ClampedExperts(1.702, 0.8, *biases)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "hidden", "inner"),
    [(1, 5, 2, 16, 24), (7, 3, 2, 33, 20), (40, 2, 1, 40, 70)],
)
@pytest.mark.parametrize("gates", ["clamped, with biases", "gelu"])
def test_experts_with_other_gates(rows, count, top_k, hidden, inner, dtype, gates):
    gate_up, down = matrices(count, hidden, inner, dtype)
    form = host = GeluExperts()
    if gates != "gelu":
        form = clamped_of(count, hidden, inner, dtype)
        host = ClampedExperts(1.702, 0.8, form.gate_up.cpu(), form.down.cpu())
    x, chosen, weights = routed(rows, hidden, count, top_k, dtype)
    stack = stack_of(gate_up, down, form)
    packed = ([KERNELS.pack(matrix.cpu()) for matrix in each] for each in (gate_up, down))
    separate = KERNELS.pack_experts(*packed, host)
    assert stack.nbytes == separate.nbytes
    assert (stack.nbytes > gate_up.nbytes + down.nbytes) == (gates != "gelu")
    expected = by_definition(x.cpu(), gate_up.cpu(), down.cpu(), host, chosen.cpu(), weights.cpu())
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for out_dtype in (None, torch.float32):
        actual = stack(x, chosen, weights, out_dtype)
        found = separate(x.cpu(), chosen.cpu(), weights.cpu(), out_dtype)
        for one in (actual.cpu(), found):
            assert one.dtype == (out_dtype or dtype)
            torch.testing.assert_close(one.double(), expected, rtol=tolerance, atol=tolerance)
        alone = stack(x[-1:].clone(), chosen[-1:].clone(), weights[-1:].clone(), out_dtype)
        assert torch.equal(alone, actual[-1:])
    require_bits(stack, x, chosen, weights, stack(x, chosen, weights))


def test_clamped_experts_compile(tmp_path):
    """Biases are added to whole sums, those of a single tile too."""
    code = """
from sametoken.ops.model.moe_rows_triton import RowGroups
from sametoken.ops.model.moe_tiles import ExpertTile
from sametoken.ops.model.activation_triton import Activation
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_triton import StackedExperts, _product
from sametoken.ops.weight import ClampedExperts

gate_up, down = (torch.zeros(3, *size, dtype=torch.bfloat16) for size in ((192, 64), (64, 96)))
clamped = ClampedExperts(1.702, 7.0, gate_up[:, :, 0].contiguous(), down[:, :, 0].contiguous())
chosen, weights = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
experts = StackedExperts(ExpertStack(gate_up), ExpertStack(down), clamped)
experts(down[0, :4, :64].contiguous(), chosen, weights)
groups, inner = RowGroups.of(chosen, 3), torch.zeros(8, 96, dtype=torch.bfloat16)
for depth in (64, 128):
    tile = ExpertTile(16, 64, depth, 4, 2)
    out = inner[:, :64].contiguous()
    _product(inner, experts.down, clamped.down, groups, out, 0, Activation("none"), tile)
"""
    compile_launches(code, tmp_path)
    compiled = list(tmp_path.rglob("_expert_kernel.ptx"))
    assert len(compiled) == 4
    assert all("add.f32" in path.read_text() for path in compiled)


def by_definition(x, gate_up, down, form, chosen, weights):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, place in torch.cartesian_prod(*map(torch.arange, chosen.shape)).tolist():
        expert = chosen[row, place]
        inner = gate_up[expert].double() @ x[row].double()
        if isinstance(form, GeluExperts):
            gate, up = inner.chunk(2)
            inner, bias = torch.nn.functional.gelu(gate, approximate="tanh") * up, 0
        else:
            gate, up = (inner + form.gate_up[expert]).chunk(2)
            gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
            inner, bias = (up + 1) * gate * torch.sigmoid(form.alpha * gate), form.down[expert]
        output = down[expert].double() @ inner + bias
        out[row] += output * weights[row, place]
    return out


@pytest.mark.usefixtures("poisoned_memory")
def test_a_part_of_the_experts_is_not_rounded():
    gate_up, down = matrices(3, 33, 20, torch.float16)
    x, chosen, weights = routed(7, 33, 3, dtype=torch.float16)
    stacked = stack_of(gate_up, down)
    actual = stacked(x, chosen, weights, torch.float32)
    separate = SeparateExperts(*([KERNELS.pack(w.cpu()) for w in each] for each in (gate_up, down)))
    expected = separate(x.cpu(), chosen.cpu(), weights.cpu(), torch.float32)
    assert expected.dtype == torch.float32
    # Gates and ups alone may have been rounded apart.
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=2e-4)
    assert not torch.equal(actual, actual.half().float())
    alone = stacked(x[-1:].clone(), chosen[-1:], weights[-1:], torch.float32)
    assert torch.equal(alone, actual[-1:])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_nan_change_no_other_row(dtype):
    """Dead rows hold anything: more of them than a tile has rows, and all of one expert."""
    stacked = stack_of(*matrices(5, 33, 20, dtype))
    x, logits = noise(40, 33, seed=3, dtype=dtype), noise(40, 5, seed=4, dtype=dtype)
    live = torch.arange(40, device=DEVICE) % 3 == 1
    x[~live] = torch.nan
    logits[~live] = torch.nan
    logits[0], logits[2] = torch.inf, -torch.inf
    chosen, weights = moe_gate(logits, Routing(2, True))
    assert ((chosen >= 0) & (chosen < 5)).all()
    got = experts.moe_forward(x, stacked, chosen, weights)
    alone = moe_gate(logits[live], Routing(2, True))
    assert torch.equal(chosen[live], alone[0])
    assert torch.equal(got[live], experts.moe_forward(x[live], stacked, *alone))


TILES = [
    ExpertTile(16, 16, 32, 4, 3),
    ExpertTile(16, 64, 128, 4, 3, tma=True),
    ExpertTile(64, 128, 64, 8, 4),
    ExpertTile(128, 128, 64, 8, 3, tma=True),
]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("gather", [2, 0])
def test_every_tile_of_a_product(tile, gated, gather):
    """Sums are exact. Experts have one row, 34 and the rest, which fill several tiles of a program;
    one has none, and by descriptor a tile holds features and rows of the next expert."""
    rows, count, out_features, in_features = 150, 4, 40, 72
    generator = torch.Generator().manual_seed(11)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).half().to(DEVICE)

    chosen = torch.full((rows, 2), 3)
    chosen[5], chosen[7:40, 0] = torch.tensor([0, 1]), 1
    chosen = chosen.to(DEVICE)
    groups = RowGroups.of(chosen, count)
    assert groups.experts.tolist() == [0, 1, 3, 2]
    assert (
        groups.counts.tolist() == chosen.flatten().bincount(minlength=count)[[0, 1, 3, 2]].tolist()
    )
    order = chosen.flatten().argsort(stable=True)
    features = 2 * out_features if gated else out_features
    weight = integers(count, features, in_features)
    x = integers(rows if gather else 2 * rows, in_features) / 128
    out = torch.empty(2 * rows, out_features, dtype=torch.half, device=DEVICE)
    follows = experts.Activation("silu_mul" if gated else "relu_squared")
    experts._product(x, ExpertStack(weight), None, groups, out, gather, follows, tile)
    by_pair = x.repeat_interleave(2, dim=0) if gather else torch.empty(2 * rows, in_features)
    if not gather:
        by_pair[order.cpu()] = x.cpu().float()
    chosen_weight = weight.float()[chosen.flatten()]
    sums = torch.einsum("pk,pnk->pn", by_pair.to(DEVICE).float(), chosen_weight).half()
    function = activation.silu_mul if gated else activation.relu_squared
    expected = function(sums.cpu()).to(DEVICE)
    expected = expected[order] if gather else expected
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("rows", "top_k", "count"), [(5, 2, 6), (150, 2, 5), (333, 3, 12), (40, 3, 3)]
)
def test_pairs_of_many_segments_are_grouped_in_order(rows, top_k, count, monkeypatch):
    """One expert has none; the last segment is short."""
    monkeypatch.setattr(moe_rows_triton, "_SEGMENT", 64)
    chosen = torch.randint(0, count, (rows, top_k), generator=torch.Generator().manual_seed(rows))
    chosen[chosen == 1] = 0
    groups = RowGroups.of(chosen.to(DEVICE), count)
    pairs = chosen.flatten()
    found = pairs.bincount(minlength=count)
    ids = sorted(range(count), key=lambda one: (not found[one], one))
    assert groups.experts.tolist() == ids
    assert groups.counts.tolist() == found[ids].tolist()
    assert groups.starts.tolist() == (found.cumsum(0) - found)[ids].tolist()
    for expert in range(count):
        own = (pairs == expert).nonzero().flatten()
        assert groups.members[expert, : len(own)].tolist() == own.tolist()


def test_tiles_of_hopper_compile(tmp_path):
    """Both products of gated experts, with tiles by descriptor; others have their own for many."""
    code = """
from sametoken.ops.model import moe_triton as experts
from sametoken.ops.model.moe_rows_triton import RowGroups
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_tiles import expert_tile
from sametoken.ops.weight import Rounding

groups = RowGroups.of(torch.zeros(4, 2, dtype=torch.int64), 3)
products = ((2, "silu_mul", 512), (0, "none", 256), (2, "relu_squared", 256))
SIXTEEN_BITS = (2, 0.1, False), (2, 20, False), (2, 300, False)
FLOAT8 = (1, 20, True), (1, 300, True), (1, 300, False)
for elements, mean_rows, whole in (*SIXTEEN_BITS, *FLOAT8):
    dtype = torch.bfloat16 if elements == 2 else torch.float8_e4m3fn
    for gather, name, features in products[: 3 if mean_rows == 300 else 2]:
        weight = torch.zeros(3, features, 192, dtype=dtype)
        scales = None if elements == 2 else torch.zeros(3, features)
        x = torch.zeros(8, 192, dtype=torch.bfloat16)
        stack = ExpertStack(weight, scales, None if scales is None else Rounding())
        tile = expert_tile(mean_rows, 256, 192, elements, name == "silu_mul", True, whole)
        out = torch.zeros(8, 256, dtype=torch.bfloat16)
        experts._product(x, stack, None, groups, out, gather, experts.Activation(name), tile)
"""
    compile_launches(code, tmp_path)
    assert len(list(tmp_path.rglob("_expert_kernel.ptx"))) == 15


def test_an_expert_that_many_rows_choose_has_programs_for_them():
    """Four for each tile of the mean, as routers have favourites; few rows fit one tile."""
    tile = ExpertTile(32, 64, 128, 4, 4)
    assert [tile.shares(mean) for mean in (0.1, 2, 2.5, 32, 33, 100)] == [1, 1, 4, 4, 8, 16]
    assert replace(tile, programs=2).shares(33) == 4


def test_few_pairs_are_alone():
    """Up to an eighth of the experts; then two seldom choose one."""
    chosen = torch.zeros(4, 2, dtype=torch.int64)
    lone = moe_rows_triton.LonePairs.of(chosen, 64)
    assert lone is not None
    assert (lone.pairs, lone.mean_rows, lone.most_chosen) == (8, 0.125, 8)
    assert moe_rows_triton.LonePairs.of(chosen, 63) is None


def test_no_rows():
    gate_up, down = matrices(2, 16, 16, torch.float32)
    assert stack_of(gate_up, down)(*routed(0, 16, 2, 1)).shape == (0, 16)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("rounding", [None, Rounding(), Rounding(grouped=True)])
def test_float8_experts(by_group, rounding, monkeypatch):
    """With the reference's rounding, as the interpreter does not round to float8 as a GPU does."""
    if DEVICE == "cpu":
        monkeypatch.setattr(experts, "rounded", lambda x, how: fp8.rounded_by(how, x))
    count, hidden, inner, rows = 3, 160, 136, 19
    generator = torch.Generator().manual_seed(7)

    def weights_of(features: int, depth: int) -> list[Fp8DeviceWeight]:
        shape = (count, features, -(-depth // 128)) if by_group else (count, features)
        values = torch.randint(-3, 4, (count, features, depth), generator=generator)
        scales = 2.0 ** torch.randint(-6, -3, shape, generator=generator)
        return [
            Fp8DeviceWeight(one.to(DEVICE).to(torch.float8_e4m3fn), scale.to(DEVICE), rounding)
            for one, scale in zip(values, scales, strict=True)
        ]

    gate_up, down = weights_of(2 * inner, hidden), weights_of(hidden, inner)
    x, chosen, weights = routed(rows, hidden, count)
    packed = StackedExperts(stacked(gate_up), stacked(down))
    actual = packed(x, chosen, weights)
    plain = [
        [Fp8Weight(w.matrix.cpu(), w.scale.cpu(), rounding) for w in each]
        for each in (gate_up, down)
    ]
    expected = SeparateExperts(*plain)(x.cpu(), chosen.cpu(), weights.cpu())
    error = (actual.cpu() - expected).norm() / expected.norm()
    # An inner activation whose last bit differs may round to the other neighbour.
    assert error < (1e-5 if rounding is None else 5e-3)
    require_bits(packed, x, chosen, weights, actual)


def int4_experts(count: int, features: int, depth: int, width: int, e2m1: bool):
    generator = torch.Generator().manual_seed(features)
    values = torch.randint(0, 16, (count, features, depth), generator=generator, dtype=torch.uint8)
    shape = (count, features, depth // width)
    zero = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    scale = 2.0 ** torch.randint(-7, -4, shape, generator=generator)
    # As NVFP4 has: these scales are numbers of e4m3.
    factors = torch.rand(count, features, generator=generator) if e2m1 and width == 16 else None
    if factors is not None:
        scale = scale.to(torch.float8_e4m3fn)
    return [
        Int4Matrix(
            packed_int4(own, width),
            scales,
            None if e2m1 else zeros,
            factor=None if factors is None else factors[index],
        )
        for index, (own, scales, zeros) in enumerate(zip(values, scale, zero, strict=True))
    ]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("e2m1", "width", "form"), [(True, 32, True), (False, 64, False), (True, 16, False)]
)
def test_experts_in_four_bits(e2m1, width, form):
    """One group in a row of the second product, many in the first.

    Few enough rows for one tile: under the interpreter a product's bits follow its sizes.
    """
    count, hidden, inner, rows = 3, 128, 64, 11
    matrices = (
        int4_experts(count, 2 * inner, hidden, width, e2m1),
        int4_experts(count, hidden, inner, 64, e2m1),
    )
    clamped = clamped_of(count, hidden, inner, torch.float32) if form else None
    x, chosen, weights = routed(rows, hidden, count)
    packed = StackedExperts(
        *(stacked([Int4DeviceWeight.of(on_device(one)) for one in each]) for each in matrices),
        clamped,
    )
    host = clamped and replace(clamped, gate_up=clamped.gate_up.cpu(), down=clamped.down.cpu())
    plain = SeparateExperts(*([Int4Weight(one) for one in each] for each in matrices), form=host)
    actual = packed(x, chosen, weights)
    expected = plain(x.cpu(), chosen.cpu(), weights.cpu())
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)
    require_bits(packed, x, chosen, weights, actual)


def on_device(matrix: Int4Matrix) -> Int4Matrix:
    zero = None if matrix.zero is None else matrix.zero.to(DEVICE)
    factor = None if matrix.factor is None else matrix.factor.to(DEVICE)
    return Int4Matrix(matrix.values.to(DEVICE), matrix.scale.to(DEVICE), zero, factor=factor)


def test_experts_in_four_bits_compile(tmp_path):
    code = """
from dataclasses import replace
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.moe_triton import StackedExperts

def stack(features, depth, width, zeros):
    blocks = -(-depth // 128)
    words = torch.zeros(3, features, 16 * blocks, dtype=torch.int32)
    scales = torch.zeros(3, 128 // width * blocks, features)
    powers = torch.zeros(3, blocks, features, dtype=torch.int32)
    if zeros:
        return Int4Panels(words, scales, scales.int(), depth, False, True)
    return Int4Panels(words, powers, None, depth, True, False)

def with_factors(features, depth):
    one = stack(features, depth, 32, False)
    return replace(one, scales=torch.cat([one.scales] * 2, 1), factors=torch.zeros(3, features))

x = torch.zeros(4, 128, dtype=torch.bfloat16)
chosen, weights = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
for zeros in (True, False):
    StackedExperts(stack(192, 128, 32, zeros), stack(128, 96, 32, zeros))(x, chosen, weights)
StackedExperts(with_factors(192, 128), with_factors(128, 96))(x, chosen, weights)
"""
    compile_launches(code, tmp_path)


def test_tiles_of_many_rows_fit_a_newer_gpu_with_less_memory(tmp_path):
    """In 16 bits, fp32, and 4 bits."""
    code = """
from sametoken.ops.model import moe_triton as experts
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.moe_rows_triton import RowGroups
from sametoken.ops.model.moe_stack import ExpertStack

experts.has_hoppers_memory = lambda tensor: False
experts.supports_pdl = lambda tensor: True
groups = RowGroups.of(torch.zeros(600, 2, dtype=torch.int64), 3)
words, scales = torch.zeros(3, 512, 32, dtype=torch.int32), torch.zeros(3, 8, 512)
panels = Int4Panels(words, scales, scales.int(), 256, False, True)
half, full = torch.bfloat16, torch.float32
stacks = [(ExpertStack(torch.zeros(3, 512, 256, dtype=one)), one) for one in (half, full)]
for stack, dtype in (*stacks, (panels, half)):
    x, out = torch.zeros(600, 256, dtype=dtype), torch.zeros(1200, 256, dtype=dtype)
    experts._product(x, stack, None, groups, out, 2, experts.Activation("silu_mul"))
"""
    compile_launches(code, tmp_path, 120)


def test_four_bit_experts_of_unlike_forms_or_in_act_order_are_refused():
    first, second = (int4_experts(1, 64, 64, 32, e2m1)[0] for e2m1 in (True, False))
    with pytest.raises(UnsupportedError, match="different formats"):
        stacked([Int4DeviceWeight.of(first), Int4DeviceWeight.of(second)])
    ordered = replace(first, order=torch.arange(64))
    with pytest.raises(UnsupportedError, match="act-order"):
        stacked([Int4DeviceWeight.of(ordered)])


def test_experts_of_unlike_forms_are_refused():
    matrix, scale = torch.zeros(4, 8).to(torch.float8_e4m3fn), torch.ones(4)
    one = Fp8DeviceWeight(matrix, scale)
    for other in (Fp8DeviceWeight(matrix, scale, None), Fp8DeviceWeight(matrix, torch.ones(4, 1))):
        with pytest.raises(UnsupportedError, match="different formats"):
            stacked([one, other])
