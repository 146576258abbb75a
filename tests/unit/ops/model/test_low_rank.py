"""Low-rank adapters beside a product: C, PyTorch and Triton, and rows that know no other rows."""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.errors import InvariantError
from sametoken.ops.model import activation, low_rank_triton
from sametoken.ops.model.low_rank import Chosen, Factors, Room, RowAdapters, SeparateUpdates
from sametoken.ops.model.low_rank_triton import StackedUpdates
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

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
def test_triton_adds_what_the_reference_adds(monkeypatch, in_features):
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
    expected = out.clone()
    separate = filled(SeparateUpdates.of(REFERENCE.pack, SIZES, room(torch.float32)), parts)
    separate.begin(x, Chosen(chosen))(expected)
    torch.testing.assert_close(mine.cpu(), expected, rtol=1e-5, atol=1e-4)
    for row, number in enumerate(CHOSEN):
        assert torch.equal(mine[row].cpu(), out[row]) is (number == 0)
    assert torch.equal(mine[3, :40].cpu(), out[3, :40])
    assert torch.equal(mine[2, 40:].cpu(), out[2, 40:])


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
""",
        tmp_path,
    )
