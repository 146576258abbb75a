"""Logits with eight-bit weights on a GPU: both operands float8 e4m3, sums fp32.

The kernel is that of ``gemm.triton``. Of a loop turn's ``DEPTH`` products a matrix unit may
keep 14 bits, so every choice has that depth, and no choice changes a bit
(tests/gpu/test_eight_bit_gpu.py).
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.gemm import triton as gemm
from sametoken.kernels.gemm.eight_bit import EightBitWeight
from sametoken.kernels.gemm.tuning import TritonConfig
from sametoken.kernels.overlap import overlapped, wait_for_earlier

#: Elements of the sum per loop turn.
DEPTH = 128

#: Hopper's unit for operands in shared memory takes so many features at once.
FEATURES = 64

#: From so many features on programs come in many waves, and only the first could fetch early.
WIDE = 100_000

#: Depth of the load pipeline by a tile's rows; each fits the 99 KiB of compute capability 8.9.
_STAGES = {16: 5, 32: 4, 64: 4, 128: 3}

#: The same for wide weights, whose tiles have half as many features.
_WIDE_STAGES = {16: 6, 32: 6, 64: 6, 128: 3}

_ROUNDED_PER_PROGRAM = 1024


def default_config(out_features: int, rows: int, overlap: bool) -> TritonConfig:
    """A kernel for a shape; ``benchmarks/eight_bit_gpu.py`` times others beside it."""
    block_rows = next((size for size in _STAGES if rows <= size), 128)
    wide, large = out_features >= WIDE, block_rows == 128
    return TritonConfig(
        block_rows,
        64 if wide and not large else 128,
        DEPTH,
        num_warps=8 if large else 4,
        num_stages=(_WIDE_STAGES if wide else _STAGES)[block_rows],
        overlap=overlap,
        prefetch_bytes=0 if wide else 1024,
    )


def logits(x: Tensor, weight: EightBitWeight, config: TritonConfig | None = None) -> Tensor:
    """``eight_bit.logits`` on a GPU: [L, K] -> [L, V] fp32.

    Args:
        x: [L, K], contiguous.
        weight: [V, K].
        config: by default that of ``default_config``; its depth is ``DEPTH``.
    """
    rows, in_features = x.shape
    assert in_features == weight.in_features
    assert weight.matrix.is_contiguous()
    config = config or default_config(weight.out_features, rows, overlapped(x)["OVERLAP"])
    assert config.block_depth == DEPTH
    assert config.block_features % FEATURES == 0
    return gemm.tiled_product(config, rounded(x), weight.matrix, "scaled_logits", weight.scale)


def rounded(x: Tensor) -> Tensor:
    """``eight_bit.rounded`` on a GPU, of a contiguous tensor."""
    assert x.is_contiguous()
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    if x.numel():
        programs = triton.cdiv(x.numel(), _ROUNDED_PER_PROGRAM)
        _round_kernel[(programs,)](x, out, x.numel(), BLOCK=_ROUNDED_PER_PROGRAM, **overlapped(x))
    return out


@triton.jit
def _round_kernel(
    x,  # [num_elements]
    out,  # [num_elements] float8 e4m3
    num_elements,
    OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_earlier(OVERLAP)
    value = tl.load(x + at, mask=at < num_elements, other=0.0).to(tl.float32)
    # The largest e4m3 is 448.
    value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < num_elements)
