"""Keyed sampling (Gumbel-max trick) in Triton: a key per vocabulary tile, then their maximum."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import SampledRows
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.sampling import sample as keys

# Large tiles spend less on reductions; few rows need more tiles to fill the chip.
_BLOCK, _WIDE_BLOCK, _ROWS_OF_WIDE = 1024, 4096, 16

_NAN_RANK = tl.constexpr(keys.NAN_RANK)
_NO_TOKEN_RANK = tl.constexpr(keys.NO_TOKEN_RANK)
_ID_MASK = tl.constexpr(keys.ID_MASK)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def philox_words(
    seed,  # scalar int64
    position,  # scalar int64
    first_id,  # scalar, a multiple of 4
    BLOCK: tl.constexpr,
):
    """[BLOCK] uint32 noise words of token ids first_id .. first_id + BLOCK - 1."""
    blocks = (first_id // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = blocks * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, blocks, low, high, zero)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def philox_words_of(
    seed,  # scalar int64
    position,  # scalar int64
    token_ids,  # [BLOCK] int64
):
    """[BLOCK] uint32 noise words of any token ids: one word of a counter block per id."""
    blocks = (token_ids // 4).to(tl.uint32)
    zero = blocks * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, blocks, low, high, zero)
    lane = token_ids % 4
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def gumbel_noise(
    words,  # uint32
):
    """Standard Gumbel noise, fp32 and finite, from uniform 32-bit words.

    Multiply-adds are explicit, so every tile size gives the same bits.
    """
    uniform = tl.fma(words.to(tl.float32), 2.0**-32, 2.0**-33)
    uniform = tl.minimum(uniform, 1.0 - 2.0**-24)
    # -log(1 - u) loses the digits of a small u, where noise is largest: use a series there.
    series = tl.fma(uniform, 1.0 / 6.0, 0.2)
    series = tl.fma(uniform, series, 0.25)
    series = tl.fma(uniform, series, 1.0 / 3.0)
    series = tl.fma(uniform, series, 0.5)
    series = tl.fma(uniform * uniform, series, uniform)
    exponential = tl.where(uniform < 2.0**-4, series, -_log(1.0 - uniform))
    return -_log(exponential)


@triton.jit
def _log(x):
    """Natural log by the special function unit: absolute error below 2e-7 near 1, else relative."""
    if _INTERPRETED:
        return tl.log(x)
    log2 = tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return log2 * 0.6931471805599453


@triton.jit
def _best_of_tile(value, first_id, BLOCK: tl.constexpr):
    """The key of the best of [BLOCK] fp32 values; ids count from first_id."""
    ids = tl.arange(0, BLOCK)
    best = tl.max(value, axis=0)
    index = tl.where(value >= best, ids, BLOCK - 1)
    # NaN gets a negative index, below all others, which marks the tile.
    index = tl.min(tl.where(value != value, ids - BLOCK, index), axis=0)
    bits = tl.where(best == 0.0, 0.0, best).to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = tl.where(index < 0, _NAN_RANK, rank)
    index = tl.where(index < 0, index + BLOCK, index)
    return (rank.to(tl.int64) << 32) | (_ID_MASK - (first_id + index).to(tl.int64))


@triton.jit
def token_of(key):
    """The token id in a key; a column if keys were made with ``token_ids``."""
    return _ID_MASK - (key & _ID_MASK)


@triton.jit
def has_nan(key):
    """Whether the best value of a key is NaN."""
    return (key >> 32) == _NAN_RANK


@triton.jit
def has_no_valid_token(key):
    """Whether the best value of a key is -inf: the row has no valid token."""
    return (key >> 32) == _NO_TOKEN_RANK


@triton.jit
def _tile_keys_kernel(
    logits,  # [L, VOCAB_SIZE]
    temperature,  # [S] or [L], 0 for greedy rows
    seeds,  # [S] or [L]
    slots,  # [L], rows of temperature and seeds, or None: row l
    positions,  # [L]
    token_ids,  # [VOCAB_SIZE], ascending, or None: column i is token i
    keys,  # [L, NUM_TILES]
    POSITION_OFFSET: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    program = tl.program_id(0)
    row = (program // NUM_TILES).to(tl.int64)
    tile = program % NUM_TILES
    first_id = tile * BLOCK
    ids = first_id + tl.arange(0, BLOCK)
    value = tl.load(logits + row * VOCAB_SIZE + ids, ids < VOCAB_SIZE, other=float("-inf"))
    owner = row if slots is None else tl.load(slots + row)
    divisor = tl.load(temperature + owner)
    if divisor > 0.0:
        position = tl.load(positions + row) + POSITION_OFFSET
        seed = tl.load(seeds + owner)
        if token_ids is None:
            words = philox_words(seed, position, first_id, BLOCK)
        else:
            mapped = tl.load(token_ids + ids, ids < VOCAB_SIZE, other=0)
            words = philox_words_of(seed, position, mapped)
        # Same order as value / divisor + noise, without the division.
        value = tl.fma(gumbel_noise(words), divisor, value)
    tl.store(keys + row * NUM_TILES + tile, _best_of_tile(value, first_id, BLOCK))


@triton.jit
def _best_of_tiles_kernel(
    keys,  # [L, NUM_TILES]
    token_ids,  # as in _tile_keys_kernel
    tokens,  # [L]
    NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK)
    lowest = tl.full((BLOCK,), -(2**63), tl.int64)
    key = tl.max(tl.load(keys + row * NUM_TILES + tiles, tiles < NUM_TILES, other=lowest), axis=0)
    token = token_of(key)
    if token_ids is not None:
        token = tl.load(token_ids + token)
    tl.store(tokens + row, token)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """See ``sample.sample``."""
    keys = _tile_keys(logits, temperature, seeds, slots, positions, 0, token_ids)
    num_rows, num_tiles = keys.shape
    tokens = keys.new_empty(num_rows)
    if num_rows:
        _best_of_tiles_kernel[(num_rows,)](
            keys,
            token_ids,
            tokens,
            NUM_TILES=num_tiles,
            BLOCK=triton.next_power_of_2(num_tiles),
            num_warps=1,
            **pdl_options(keys),
        )
    return tokens


def token_keys(logits: Tensor, temperature: Tensor, seeds: Tensor, rows: SampledRows) -> Tensor:
    """See ``Kernels.token_keys``; one launch."""
    return _tile_keys(logits, temperature, seeds, rows.slots, rows.positions, 1)


def _tile_keys(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    slots: Tensor | None,
    positions: Tensor,
    position_offset: int,
    token_ids: Tensor | None = None,
) -> Tensor:
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert token_ids is None or token_ids.shape == (vocab_size,)
    block = _BLOCK if num_rows < _ROWS_OF_WIDE else _WIDE_BLOCK
    num_tiles = triton.cdiv(vocab_size, block)
    keys = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=logits.device)
    if num_rows:
        _tile_keys_kernel[(num_rows * num_tiles,)](
            logits,
            temperature,
            seeds,
            slots,
            positions,
            token_ids,
            keys,
            POSITION_OFFSET=position_offset,
            VOCAB_SIZE=vocab_size,
            NUM_TILES=num_tiles,
            BLOCK=block,
            num_warps=4,
            **pdl_options(logits),
        )
    return keys
