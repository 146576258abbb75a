"""Top-k, top-p and min-p truncation in Triton: one program per row bisects for the threshold.

The first pass over a row keeps the two best logits of every lane, its *leaders*; every logit
above ``limit``, the best of the others, is a leader. A threshold among leaders is found without
another read of the row. A lower one costs a pass over the row per bisection step, at most 32 for
top_k and 32 for top_p.

``sampling.truncation`` defines the result. Masses come from fp32 exponentials here, accurate to a
few millionths; all sums are of integers, so they depend neither on lanes nor on order.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.sampling.logits_rules import Truncation
from sametoken.ops.sampling.truncation import MASS_OF_BEST

_LANES = 4096

_LOWEST = tl.constexpr(-0x7F800001)  # the image of -inf
_MASS_OF_BEST = tl.constexpr(float(MASS_OF_BEST))


@triton.jit
def _image_of(logit):
    """Order-preserving int64 image of an fp32 scalar; both zeros have the same image."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _logit_of(image):
    """The inverse of ``_image_of``; NaN above the image of infinity, which no logit reaches."""
    bits = image.to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _distance(logit, best, inverse):
    """(logit - best) / temperature: at most 0, exactly 0 for the best."""
    return tl.where(logit == best, 0.0, (logit - best) * inverse)


@triton.jit
def _mass_of(logit, best, inverse):
    """Mass of a token, int64; 2^40 for the best."""
    return (tl.exp(_distance(logit, best, inverse)) * _MASS_OF_BEST).to(tl.int64)


@triton.jit
def _tile(row, start, vocab_size, LANES: tl.constexpr):
    """[LANES] logits of the columns from ``start``; -inf past the last."""
    column = start + tl.arange(0, LANES)
    return tl.load(row + column, column < vocab_size, other=float("-inf"))


@triton.jit
def _leaders_of(row, vocab_size, LANES: tl.constexpr):
    """The two best logits of every lane [2 * LANES], the best other one, and whether NaN occurs."""
    first = tl.full((LANES,), float("-inf"), tl.float32)
    second, others = first, first
    is_nan = first != first
    for start in tl.range(0, vocab_size, LANES, loop_unroll_factor=4):
        logit = _tile(row, start, vocab_size, LANES)
        others = tl.maximum(others, tl.minimum(second, logit))
        second = tl.maximum(second, tl.minimum(first, logit))
        first = tl.maximum(first, logit)
        is_nan |= logit != logit
    leaders = tl.reshape(tl.join(first, second), (2 * LANES,))
    return leaders, tl.max(others, axis=0), tl.max(is_nan.to(tl.int32), axis=0) != 0


@triton.jit
def _weigh(
    lowest,  # fp32
    leaders,  # [2 * LANES]
    masses,  # [2 * LANES] int64, of the leaders; None: each token has mass 1
    limit,  # every logit above it is a leader
    row,  # [V]
    best,
    inverse,
    vocab_size,  # V
    LANES: tl.constexpr,
):
    """Total mass, int64, of the tokens whose logit is at least ``lowest``."""
    if lowest > limit:
        weights = 1 if masses is None else masses
        weight = tl.sum(tl.where(leaders >= lowest, weights, 0).to(tl.int64), axis=0)
    else:
        partial = tl.zeros((LANES,), tl.int32 if masses is None else tl.int64)
        for start in tl.range(0, vocab_size, LANES, loop_unroll_factor=4 if masses is None else 2):
            logit = _tile(row, start, vocab_size, LANES)
            weights = 1 if masses is None else _mass_of(logit, best, inverse)
            partial += tl.where(logit >= lowest, weights, 0)
        weight = tl.sum(partial, axis=0).to(tl.int64)
    return weight


@triton.jit
def _edge(
    goal,  # int64, at least 1 and at most the mass of all tokens
    leaders,  # this and the rest as in _weigh
    masses,
    limit,
    row,
    best,
    inverse,
    vocab_size,  # V
    LANES: tl.constexpr,
):
    """Int64: the highest image for which the tokens from it upwards have mass ``goal`` or more."""
    high = _image_of(best)
    low = high * 0 + _LOWEST
    # The first step decides whether the threshold is among the leaders.
    middle = _image_of(limit) + 1
    while low < high:
        lowest = _logit_of(middle)
        weight = _weigh(lowest, leaders, masses, limit, row, best, inverse, vocab_size, LANES)
        if weight >= goal:
            low = middle
        else:
            high = tl.minimum(high, middle - 1)
        middle = high - (high - low) // 2
    return low


@triton.jit
def _likely_edge(min_p, best, inverse):
    """Int64: the lowest image of a logit at least ``min_p`` times as likely as the best."""
    least = tl.log(min_p)
    high = _image_of(best)
    low = high * 0 + _LOWEST
    while low < high:
        middle = low + (high - low) // 2
        if _distance(_logit_of(middle), best, inverse).to(tl.float64) >= least:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _forbid_below(row, edge, vocab_size, LANES: tl.constexpr):
    """Write -inf for all tokens below the threshold."""
    for start in tl.range(0, vocab_size, LANES, loop_unroll_factor=4):
        removed = _tile(row, start, vocab_size, LANES) < edge
        column = start + tl.arange(0, LANES)
        tl.store(row + column, float("-inf"), removed & (column < vocab_size))


@triton.jit
def _forbid_at(row, edge, num_kept, vocab_size, LANES: tl.constexpr):
    """Write -inf for the tokens at the threshold, except the ``num_kept`` lowest ids."""
    seen = 0
    for start in tl.range(0, vocab_size, LANES):
        level = (_tile(row, start, vocab_size, LANES) == edge).to(tl.int32)
        place = seen + tl.cumsum(level, axis=0)
        seen += tl.sum(level, axis=0)
        column = start + tl.arange(0, LANES)
        removed = (level != 0) & (place > num_kept)
        tl.store(row + column, float("-inf"), removed & (column < vocab_size))


@triton.jit
def _truncate_row(
    row,  # [V], written
    temperature,
    top_k,
    top_p,
    min_p,
    vocab_size,  # V
    LANES: tl.constexpr,
):
    leaders, limit, is_nan = _leaders_of(row, vocab_size, LANES)
    best = tl.max(leaders, axis=0)
    if (best > float("-inf")) & ~is_nan:
        inverse = tl.div_rn(1.0, temperature)
        edge = top_k * 0 + _LOWEST
        if min_p > 0:
            edge = _likely_edge(min_p, best, inverse)
        if (top_k > 0) & (top_k < vocab_size):
            kth = _edge(top_k, leaders, None, limit, row, best, inverse, vocab_size, LANES)
            edge = tl.maximum(edge, kth)
        if top_p < 1:
            masses = _mass_of(leaders, best, inverse)
            left = _logit_of(edge)
            total = _weigh(left, leaders, masses, limit, row, best, inverse, vocab_size, LANES)
            goal = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
            goal = tl.minimum(tl.maximum(goal, 1), total)
            edge = _edge(goal, leaders, masses, limit, row, best, inverse, vocab_size, LANES)
            last, upper = _logit_of(edge), _logit_of(edge + 1)
            reached = _weigh(last, leaders, masses, limit, row, best, inverse, vocab_size, LANES)
            above = _weigh(upper, leaders, masses, limit, row, best, inverse, vocab_size, LANES)
            each = _mass_of(last, best, inverse)
            num_kept = tl.cdiv(goal - above, each)
            if reached - above > num_kept * each:
                _forbid_at(row, last, num_kept, vocab_size, LANES)
        _forbid_below(row, _logit_of(edge), vocab_size, LANES)


@triton.jit
def _truncate_kernel(
    logits,  # [L, V], written
    slots,  # [L]
    temperature,  # [S]
    top_k,  # [S]
    top_p,  # [S]
    min_p,  # [S]
    vocab_size,  # V
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    divisor = tl.load(temperature + slot)
    k, p, least = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
    if (divisor > 0) & ((k > 0) | (p < 1) | (least > 0)):
        _truncate_row(logits + row * vocab_size, divisor, k, p, least, vocab_size, LANES)


def truncate(logits: Tensor, slots: Tensor, truncation: Truncation) -> None:
    """See ``truncation.truncate``.

    One launch, whose shape depends on that of ``logits`` only. Rows of slots without truncation
    are not read.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    if num_rows:
        _truncate_kernel[(num_rows,)](
            logits,
            slots,
            truncation.temperature,
            truncation.top_k,
            truncation.top_p,
            truncation.min_p,
            vocab_size,
            LANES=_LANES,
            num_warps=16,
            **pdl_options(logits),
        )
