"""Weights rounded to nearest, without data, to the tensors of a quantized format.

NVFP4, MXFP4 and float8 by block or tensor are what compressed-tensors makes of the weight, to the
bit; of an fp32 weight in the case of float8, whose scales stay fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from sametoken.models.load import mxfp4, nvfp4_linear
from sametoken.models.load.fp8_linear import BLOCK
from sametoken.models.load.sources import FLOATING
from sametoken.ops.model.gemm.fp8 import LARGEST, powers_from, rounded
from sametoken.ops.model.gemm.int4 import E2M1

#: Scales in place of 0, as compressed-tensors writes them.
_OF_ZEROS, _OF_ZEROS_FP8 = torch.finfo(torch.float32).eps, 0.125
#: The largest number of e2m1, and the power of two below it.
_MOST, _POWER = E2M1[7], 2
#: Above each border e2m1 has its next number; a tie goes to the even code.
_BORDERS = tuple((low + high) / 2 for low, high in pairwise(E2M1[:8]))


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format that weights can be rounded to.

    Attributes:
        suffixes: what follows the module in the names of its tensors.
        group: features that share a scale: a weight's must be a multiple of it.
        rounded: those tensors of a finite weight of any floating dtype.
    """

    suffixes: tuple[str, ...]
    group: int
    rounded: Callable[[Tensor], tuple[Tensor, ...]]

    def names(self, module: str) -> tuple[str, ...]:
        """Names of the module's tensors."""
        return tuple(f"{module}{suffix}" for suffix in self.suffixes)

    def tensors(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        """The module's tensors by name; ``weight`` is [N, K], or a stack as the scheme says."""
        return dict(zip(self.names(module), self.rounded(weight), strict=True))


def float8(scales: str, scale_name: str = "weight_scale") -> Scheme:
    """float8 e4m3, scales by "channel" (in the weight's dtype), "block" or "tensor" (fp32), or
    "block_ue8m0", powers of two.
    """
    by: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
        "channel": _fp8_by_row,
        "block": _fp8_by_block,
        "block_ue8m0": partial(_fp8_by_block, powers=True),
        "tensor": _fp8_by_tensor,
    }
    return Scheme((".weight", f".{scale_name}"), 1, by[scales])


def int4(group: int) -> Scheme:
    """``pack-quantized``: 4 bits, symmetric, a scale per row and group of features."""
    suffixes = (".weight_packed", ".weight_scale", ".weight_shape")
    return Scheme(suffixes, group, partial(_int4, group=group))


def _fp8_by_row(weight: Tensor) -> tuple[Tensor, ...]:
    _, scale = rounded(weight)
    dtype = _dtype_of_scales(weight)
    # Below this fp16 has few scales, or 0.
    scale = scale.clamp(min=torch.finfo(dtype).tiny).to(dtype)[:, None]
    return _e4m3(weight.float() / scale.float()), scale


def _fp8_by_block(weight: Tensor, powers: bool = False) -> tuple[Tensor, ...]:
    rows, columns = weight.shape
    whole = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = _largest(blocks, (1, 3), LARGEST)
    if powers:
        scale = powers_from(scale)
    values = _e4m3(blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return values[:rows, :columns].contiguous(), scale


def _fp8_by_tensor(weight: Tensor) -> tuple[Tensor, ...]:
    scale = _largest(weight.float(), (0, 1), LARGEST)
    return _e4m3(weight.float() / scale), scale.reshape(1)


def _largest(values: Tensor, dims: tuple[int, ...], becomes: float) -> Tensor:
    """Scales by which the largest of each range becomes a number."""
    # A tensor on the device: by a number of the host, a GPU divides less exactly.
    divisor = torch.tensor(becomes, dtype=torch.float32, device=values.device)
    scale = values.abs().amax(dims) / divisor
    return torch.where(scale == 0, _OF_ZEROS, scale)


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _dtype_of_scales(weight: Tensor) -> torch.dtype:
    return weight.dtype if weight.dtype in FLOATING[1:] else torch.float32


def _int4(weight: Tensor, group: int) -> tuple[Tensor, ...]:
    groups = weight.float().unflatten(1, (-1, group))
    # 15 steps from -8 to 7 for a range twice the largest element.
    largest = groups.abs().amax(2).clamp(min=torch.finfo(torch.float16).tiny)
    scale = (largest * (2 / 15)).to(_dtype_of_scales(weight))
    signed = (groups / scale.float()[:, :, None]).round().clamp(-8, 7).flatten(1)
    return _words(signed.to(torch.int32) + 8), scale, torch.tensor(weight.shape, dtype=torch.int64)


def _words(values: Tensor) -> Tensor:
    """[N, K] int32 below 16 to [N, K / 8] int32, eight to a word, the first lowest."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
    # No two share a bit; the sum may pass 2**31, where it wraps as the bits should.
    words: Tensor = (values.unflatten(1, (-1, 8)) << shifts).sum(2, dtype=torch.int32)
    return words


def _nvfp4(weight: Tensor) -> tuple[Tensor, ...]:
    """By the weight's dtype as far as compressed-tensors does: its peaks, and their sixths."""
    weight = weight.to(_dtype_of_scales(weight))
    groups = weight.unflatten(1, (-1, nvfp4_linear.GROUP))
    peaks = groups.abs().amax(2)
    whole = peaks.amax().clamp(min=torch.finfo(peaks.dtype).tiny).reciprocal() * (LARGEST * _MOST)
    # 1 where the quotient has no number, as of a weight of zeros in fp16.
    whole = whole.nan_to_num(posinf=1.0).float().reshape(1)
    sixths = peaks / torch.tensor(_MOST, dtype=peaks.dtype, device=peaks.device)
    scale = _e4m3(whole * sixths).float()
    scale = torch.where(scale == 0, _OF_ZEROS_FP8, scale)
    codes = _e2m1(groups.float() / (scale / whole).unsqueeze(2)).flatten(1)
    return _bytes(codes), scale.to(torch.float8_e4m3fn), whole


def _mxfp4(stack: Tensor) -> tuple[Tensor, ...]:
    """Of gpt-oss's [experts, in_features, rows], one expert at a time."""
    blocks, scales = zip(*(_mxfp4_matrix(one.float().T.contiguous()) for one in stack), strict=True)
    return torch.stack(blocks), torch.stack(scales)


def _mxfp4_matrix(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of [rows, in_features] in fp32."""
    groups = weight.unflatten(1, (-1, mxfp4.GROUP))
    peaks = groups.abs().amax(2)
    # peaks = fraction * 2^exponent with a fraction of [1/2, 1): rounded up from 7/8.
    fraction, exponent = peaks.frexp()
    power = exponent - 1 + (fraction >= 0.875) - _POWER
    scales = torch.where(peaks == 0, 0, power + 127).clamp(min=0).to(torch.uint8)
    codes = _e2m1(groups / scales.view(torch.float8_e8m0fnu).float().unsqueeze(2))
    return _bytes(codes), scales


def _e2m1(values: Tensor) -> Tensor:
    """Codes of the nearest numbers of e2m1, in uint8; elements beyond the largest become it."""
    borders = torch.tensor(_BORDERS, dtype=torch.float32, device=values.device)
    # A tie below an odd code stays; one below an even code goes up.
    borders[1::2] = borders[1::2].nextafter(borders.new_zeros(()))
    codes = torch.bucketize(values.abs(), borders).to(torch.uint8)
    return codes | (values < 0).to(torch.uint8) << 3


def _bytes(codes: Tensor) -> Tensor:
    """Two codes to a byte, the first in its low half: [..., n] to [..., n / 2]."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = low | high << 4
    return packed


#: ``nvfp4-pack-quantized``, and gpt-oss's experts, stacks of [experts, in_features, rows].
NVFP4 = Scheme(
    (".weight_packed", ".weight_scale", ".weight_global_scale"), nvfp4_linear.GROUP, _nvfp4
)
MXFP4 = Scheme(("_blocks", "_scales"), mxfp4.GROUP, _mxfp4)
