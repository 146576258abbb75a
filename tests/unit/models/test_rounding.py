"""Weights rounded without data: the bits are those that compressed-tensors itself writes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.compressed import FLOAT, compressed
from sametoken.models.load.mxfp4 import MAX_SCALE, expanded
from sametoken.models.rounding import MXFP4, NVFP4, float8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E2M1 = {"num_bits": 4, "type": "float", "symmetric": True}
NVFP4_ARGS = E2M1 | {
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
}
MXFP4_ARGS = E2M1 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
#: Multiples of a group's scale at e2m1's borders, between them, and beyond its largest number.
BORDERS = (0, 0.25, 0.3, 0.75, 1.25, 1.5, 1.75, 2.5, 3, 3.5, 4.9, 5, 5.1, 6, 6.9, -0.25)


def weight_of(dtype: torch.dtype, rows: int = 40) -> torch.Tensor:
    """Rows of many sizes, a group of zeros, negative ones, and one at the borders of e2m1."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, 96, generator=generator) * torch.logspace(-3, 2, rows)[:, None]
    weight[3, :32] = 0
    weight[4, 32:64] = -0.0
    weight[5, :16] = weight[5, 16:32] = torch.tensor(BORDERS) / 8
    weight[6, 64:96] = torch.tensor([6.0, *(one + sign * 2**-7 for one in BORDERS[:8]
                                             for sign in (1, -1)), *BORDERS[:15]])  # fmt: skip
    return weight.to(dtype)


def written(folder, weight: torch.Tensor, args: dict) -> dict[str, torch.Tensor]:
    """What compressed-tensors stores of a weight."""
    (folder / "config.json").write_text("{}")
    save_file({"fc.weight": weight}, folder / "model.safetensors")
    compressed(folder, {"group_0": {"targets": ["Linear"], "weights": args}})
    return load_file(folder / "model.safetensors")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e-3, 0.0])
def test_nvfp4_has_the_library_s_bits(tmp_path, dtype, size):
    weight = weight_of(dtype) * size
    theirs = written(tmp_path, weight, NVFP4_ARGS)
    ours = NVFP4.tensors("fc", weight)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_has_the_library_s_bits(tmp_path, dtype):
    """Of each expert's matrix, whose inputs stand first."""
    weights = [weight_of(dtype), weight_of(dtype).flip(0) * 3]
    blocks, scales = MXFP4.tensors("experts", torch.stack([one.T for one in weights])).values()
    for index, weight in enumerate(weights):
        theirs = written(tmp_path, weight, MXFP4_ARGS)
        assert same(blocks[index].flatten(1), theirs["fc.weight_packed"])
        zeros = scales[index] == 0
        # In fp16 the library has 1 for the exponent of zeros.
        assert same(scales[index][~zeros], theirs["fc.weight_scale"][~zeros])
        assert zeros.sum() == 2


def test_mxfp4_takes_back_what_it_stands_for():
    """Weights that are numbers of the format stay, so an update by equal weights changes none."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (5, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(100, MAX_SCALE, (5, 3), generator=generator).to(torch.uint8)
    meant = expanded(blocks, scales)
    again = MXFP4.rounded(meant.bfloat16().T[None])
    assert torch.equal(expanded(*(one[0] for one in again)), meant)


@pytest.mark.parametrize("strategy", ["block", "tensor"])
@pytest.mark.parametrize("shape", [(130, 300), (128, 256), (5, 7)])
def test_float8_has_the_library_s_bits(tmp_path, strategy, shape):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(shape, generator=generator) * torch.linspace(0.1, 9, shape[0])[:, None]
    weight[:128, 128:256] = 0
    args = FLOAT | {"strategy": strategy}
    if strategy == "block":
        args["block_structure"] = [128, 128]
    theirs = written(tmp_path, weight, args)
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16:
            theirs = written(tmp_path, weight.to(dtype).float(), args)
        ours = float8(strategy).tensors("fc", weight.to(dtype))
        assert ours.keys() == theirs.keys()
        assert all(same(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-2, 1e-5, 0.0])
def test_a_row_of_zeros_or_nearly_has_a_scale_of_its_own(dtype, size):
    """In fp16 the scale of such a row would be 0, and its elements NaN."""
    weight = (torch.randn(4, 96, generator=torch.Generator().manual_seed(0)) * size).to(dtype)
    stored = float8("channel").tensors("fc", weight)
    scale = stored["fc.weight_scale"]
    assert scale.dtype == dtype
    got, exact = stored["fc.weight"].float() * scale.float(), weight.float()
    assert ((got - exact).abs() <= exact.abs() * 2**-4 + scale.float() * 2**-9).all()
