"""Low-rank adapters beside a product or experts: C, PyTorch, Triton, rows that know no others."""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.errors import InvariantError
from sametoken.ops.model import activation, low_rank_triton
from sametoken.ops.model.low_rank import Chosen, Factors, Room, RowAdapters
from sametoken.ops.model.low_rank_experts import ExpertFactors, ExpertSizes
from sametoken.ops.model.low_rank_experts_triton import AdaptedStackedExperts
from sametoken.ops.model.low_rank_triton import StackedUpdates
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_triton import StackedExperts
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.weight import ClampedExperts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = ReferenceKernels()
#: Of three adapters the first has two parts of other ranks, the second one part, the third another.
SIZES, RANKS = (40, 24), ((3, 17), (None, 8), (4, None))


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def factors(in_features: int, dtype: torch.dtype) -> list[list[Factors | None]]:
    def one(rank: int | None, size: int, seed: int) -> Factors | None:
        if rank is None:
            return None
        down, up = noise(rank, in_features, seed=seed), noise(size, rank, seed=seed + 1)
        return Factors(down.to(dtype), up.to(dtype), 0.25 + seed / 8)

    return [
        [
            one(rank, size, 10 * a + 3 * b)
            for b, (rank, size) in enumerate(zip(of, SIZES, strict=True))
        ]
        for a, of in enumerate(RANKS)
    ]


def filled(update, parts):
    """An update with adapters in its places, the last one over another."""
    update.prepare(parts[0])(len(parts))
    for place, own in enumerate(parts, start=1):
        update.prepare(own)(place)
    return update


def room(dtype: torch.dtype, device: str = "cpu") -> Room:
    return Room(len(RANKS), 17, dtype, torch.device(device))


def adapt(kernels, plain, in_features, dtype, rows):
    adapted = kernels.adapt(plain, SIZES, room(dtype), rows)
    filled(adapted.update, factors(in_features, dtype))
    return adapted


def added(x: torch.Tensor, chosen: list[int], parts: list[list[Factors | None]]) -> torch.Tensor:
    """What the adapters add, in fp64."""
    out = torch.zeros(len(chosen), sum(SIZES), dtype=torch.float64)
    for row, number in enumerate(chosen):
        first = 0
        own_parts = parts[number - 1] if number else (None, None)
        for own, size in zip(own_parts, SIZES, strict=True):
            if own is not None:
                middle = own.down.double() @ x[row].double()
                out[row, first : first + size] = own.scale * (own.up.double() @ middle)
            first += size
    return out


CHOSEN = [0, 1, 3, 2, 0, 1, 1, 3, *[2] * 13, 0, 1]


@pytest.mark.parametrize("kernels", [REFERENCE, NativeKernels()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_adds_its_own_adapter_whatever_the_others_choose(kernels, dtype):
    in_features = 72
    parts = factors(in_features, dtype)
    matrix, x = noise(64, in_features, seed=5, dtype=dtype), noise(23, in_features, seed=6)
    x, rows = x.to(dtype), RowAdapters()
    plain = kernels.pack(matrix.clone())
    adapted = adapt(kernels, plain, in_features, dtype, rows)
    rows.begin(torch.tensor(CHOSEN))
    out, base = adapted.matmul(x), plain.matmul(x)
    for row, number in enumerate(CHOSEN):
        rows.begin(torch.tensor([number]))
        assert torch.equal(adapted.matmul(x[row : row + 1])[0], out[row])
        assert torch.equal(out[row], base[row]) is (number == 0)
    rows.begin(torch.zeros(len(CHOSEN), dtype=torch.int64))
    assert torch.equal(adapted.gated_matmul(x), plain.gated_matmul(x))
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1}
    )
    wanted = x.double() @ matrix.double().T + added(x, CHOSEN, parts)
    torch.testing.assert_close(out.double(), wanted, **tolerance)
    # An adapter without factors for a part keeps the bits there.
    assert torch.equal(out[3, :40], base[3, :40])
    assert torch.equal(out[2, 40:], base[2, 40:])


def test_an_adapter_that_stays_keeps_little_of_those_that_went():
    kernels, parts = NativeKernels(), factors(4096, torch.float32)
    weight = kernels.pack(noise(64, 4096, seed=5))
    update = adapt(kernels, weight, 4096, torch.float32, RowAdapters()).update
    for _ in range(10):
        update.prepare(parts[0])(2)
    factors_of = (one for own in update.adapters for part in own for one in (part.down, part.up))
    held = [one.panels.untyped_storage() for one in (weight, *factors_of)]
    of_weight, *others = [(one.data_ptr(), one.nbytes()) for one in held]
    assert of_weight not in others
    assert sum(size for _, size in set(others)) < 4 * update.nbytes


def test_gate_and_up_are_adapted_before_silu():
    rows, x = RowAdapters(), noise(2, 72, seed=6)
    plain = REFERENCE.pack(noise(64, 72, seed=5))
    adapted = adapt(REFERENCE, plain, 72, torch.float32, rows)
    rows.begin(torch.tensor([1, 0]))
    assert torch.equal(adapted.gated_matmul(x), activation.silu_mul(adapted.matmul(x)))
    assert torch.equal(adapted.gated_matmul(x)[1], plain.gated_matmul(x)[1])
    assert not torch.equal(adapted.gated_matmul(x)[0], plain.gated_matmul(x)[0])


def test_a_product_of_other_rows_is_refused():
    rows = RowAdapters()
    adapted = adapt(REFERENCE, REFERENCE.pack(noise(64, 72, seed=5)), 72, torch.float32, rows)
    for chosen in ([0, 0, 0], [0]):
        rows.begin(torch.tensor(chosen))
        with pytest.raises(InvariantError, match="2 rows is not of all rows"):
            adapted.matmul(noise(2, 72, seed=6))


@pytest.mark.parametrize("in_features", [72, 1040])
def test_triton_adds_what_adapters_add(monkeypatch, in_features):
    parts, x = factors(in_features, torch.float32), noise(23, in_features, seed=6)
    out, chosen = noise(23, 64, seed=7), torch.tensor(CHOSEN)
    # NaN before and after what may be written.
    memory = torch.full((33, 64), float("nan"), device=DEVICE)
    mine = memory[5:28]
    mine.copy_(out)
    on_device = [
        [one and Factors(one.down.to(DEVICE), one.up.to(DEVICE), one.scale) for one in of]
        for of in parts
    ]
    update = filled(StackedUpdates.of(in_features, SIZES, room(torch.float32, DEVICE)), on_device)
    update.begin(x.to(DEVICE), Chosen(chosen.to(DEVICE)))(mine)
    assert memory[:5].isnan().all()
    assert memory[28:].isnan().all()
    as_many = out.clone().to(DEVICE)
    monkeypatch.setattr(low_rank_triton, "_MANY_ROWS", 17)
    update.begin(x.to(DEVICE), Chosen(chosen.to(DEVICE)))(as_many)
    assert torch.equal(as_many, mine)
    expected = out.double() + added(x, CHOSEN, parts)
    torch.testing.assert_close(mine.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    for row, number in enumerate(CHOSEN):
        assert torch.equal(mine[row].cpu(), out[row]) is (number == 0)
    assert torch.equal(mine[3, :40].cpu(), out[3, :40])
    assert torch.equal(mine[2, 40:].cpu(), out[2, 40:])


COUNT, HIDDEN, INNER, TOP_K = 3, 40, 24, 2


def expert_factors(parts: int, seed: int) -> list[ExpertFactors]:
    """Of an adapter: one expert has none, another some, each of other ranks."""

    def one(size: int, width: int, own: int) -> Factors:
        rank = 1 + own % 17
        down, up = noise(rank, width, seed=own), noise(size, rank, seed=own + 1)
        return Factors(down / width**0.5, up / rank**0.5, 0.25 + own / 64)

    first = [one(INNER, HIDDEN, seed + 10 * part) for part in range(parts)]
    last = one(HIDDEN, INNER, seed + 5)
    return [
        ExpertFactors([None] * parts, None),
        ExpertFactors(first, last),
        ExpertFactors([*first[1:], None], one(HIDDEN, INNER, seed + 7)),
    ]


def inner_of(form, gate_up: torch.Tensor) -> torch.Tensor:
    if form is None:
        return torch.relu(gate_up) ** 2
    gate, up = gate_up.chunk(2, dim=-1)
    if form == "silu":
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return gate * torch.sigmoid(form.alpha * gate) * (up + 1)


def of_row(x, weights, chosen, form, matrices, own: list[ExpertFactors] | None) -> torch.Tensor:
    """What the experts make of a row by the definition, in fp64."""
    total = torch.zeros(HIDDEN, dtype=torch.float64)
    biases = (form.gate_up, form.down) if isinstance(form, ClampedExperts) else ([0] * COUNT,) * 2
    for expert, weight in zip(chosen.tolist(), weights.double(), strict=True):
        first, second = (each[expert].double() for each in matrices)
        if own is not None:
            added = [
                torch.zeros(INNER, HIDDEN).double()
                if one is None
                else one.scale * one.up.double() @ one.down.double()
                for one in own[expert].inputs
            ]
            first = first + torch.cat(added)
            if (last := own[expert].output) is not None:
                second = second + last.scale * last.up.double() @ last.down.double()
        inner = inner_of(form, first @ x.double() + biases[0][expert])
        total += weight * (second @ inner + biases[1][expert])
    return total


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("kernels", ["reference", "native", "triton"])
@pytest.mark.parametrize("kind", ["silu", "clamped", "ungated"])
def test_a_row_s_experts_add_its_own_adapter_whatever_the_others_choose(kernels, kind):
    at = torch.device(DEVICE if kernels == "triton" else "cpu")
    parts = 1 if kind == "ungated" else 2
    form = {"silu": "silu", "ungated": None}.get(kind)
    if kind == "clamped":
        biases = noise(COUNT, 2 * INNER, seed=1), noise(COUNT, HIDDEN, seed=2)
        form = ClampedExperts(1.702, 0.8, *biases)
    matrices = (
        noise(COUNT, parts * INNER, HIDDEN, seed=3) / HIDDEN**0.5,
        noise(COUNT, HIDDEN, INNER, seed=4) / INNER**0.5,
    )
    own_form, rows = form if kind == "clamped" else None, RowAdapters()
    sizes = ExpertSizes(COUNT, HIDDEN, (INNER,) * parts)
    if kernels == "triton":
        own_form = own_form and ClampedExperts(1.702, 0.8, *(one.to(at) for one in biases))
        stacks = (ExpertStack(one.to(at)) for one in matrices)
        plain = StackedExperts(*stacks, own_form)
        experts = AdaptedStackedExperts.of(plain, sizes, room(torch.float32, DEVICE), rows)
    else:
        backend = REFERENCE if kernels == "reference" else NativeKernels()
        packed = ([backend.pack(one.clone()) for one in each] for each in matrices)
        plain = backend.pack_experts(*packed, own_form)
        experts = backend.adapt_experts(plain, sizes, room(torch.float32), rows)
    adapters = [expert_factors(parts, seed) for seed in (20, 60)]
    experts.prepare(expert_factors(parts, 90))(1)
    for place, own in enumerate(adapters, start=1):
        experts.prepare(own)(place)
    assert experts.nbytes > plain.nbytes
    numbers = torch.tensor([0, 1, 2, 2, 0, *[1] * 17, 0, 2], device=at)
    count = len(numbers)
    x = noise(count, HIDDEN, seed=5)
    weights, chosen = noise(count, COUNT, seed=6).softmax(dim=1).topk(TOP_K)
    given = [one.contiguous().to(at) for one in (x, chosen, weights)]
    for out_dtype in (None, torch.float32):
        rows.begin(numbers)
        out, base = experts(*given, out_dtype), plain(*given, out_dtype)
        for row, number in enumerate(numbers.tolist()):
            rows.begin(numbers[row : row + 1])
            alone = [one[row : row + 1].clone() for one in given]
            assert torch.equal(experts(*alone, out_dtype)[0], out[row])
            changed = number > 0 and chosen[row].tolist() != [0]
            assert torch.equal(out[row], base[row]) is not changed
            own = adapters[number - 1] if number else None
            expected = of_row(x[row], weights[row], chosen[row], form, matrices, own)
            torch.testing.assert_close(out[row].double().cpu(), expected, rtol=1e-4, atol=1e-4)


def test_triton_s_kernels_compile_for_each_kind_of_product(tmp_path):
    """One row and many, three parts, an in-place sum in fp32, and a rank of one."""
    compile_launches(
        """
import torch
from sametoken.ops.model.low_rank import Chosen, Room
from sametoken.ops.model.low_rank_triton import StackedUpdates

bf16 = torch.bfloat16
update = StackedUpdates.of(200, [64, 64, 64], Room(1, 1, bf16, torch.device("cpu")))
for rows, out in ((1, bf16), (40, torch.float32), (600, bf16)):
    x, numbers = torch.zeros(rows, 200, dtype=bf16), torch.zeros(rows, dtype=torch.int64)
    update.begin(x, Chosen(numbers))(torch.zeros(rows, 192, dtype=out))

from sametoken.ops.model.low_rank import RowAdapters
from sametoken.ops.model.low_rank_experts import ExpertSizes
from sametoken.ops.model.low_rank_experts_triton import AdaptedStackedExperts
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_triton import StackedExperts

for parts, out in ((2, bf16), (1, torch.float32)):
    stacks = [torch.zeros(4, *size, dtype=bf16) for size in ((parts * 48, 200), (200, 48))]
    rows, room = RowAdapters(), Room(2, 20, bf16, torch.device("cpu"))
    experts = StackedExperts(*map(ExpertStack, stacks))
    adapted = AdaptedStackedExperts.of(experts, ExpertSizes(4, 200, (48,) * parts), room, rows)
    rows.begin(torch.zeros(3, dtype=torch.int64))
    x, chosen = torch.zeros(3, 200, dtype=bf16), torch.zeros(3, 2, dtype=torch.int64)
    adapted(x, chosen, torch.zeros(3, 2), out)
""",
        tmp_path,
    )
