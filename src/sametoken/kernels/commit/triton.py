"""Judge and commit in their padded form; the reference of commit is ``state.commit``.

Padding (``num_query`` 0) is judged to accept nothing and writes nothing. Only the step may
call what writes ``Sequences``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.commit.rows import commit_row, judge_row
from sametoken.kernels.overlap import overlapped, wait_for_earlier
from sametoken.kernels.stage.triton import PaddedInputs

_KEYS_AT_A_TIME = 2048


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of B windows of W rows.

    Attributes:
        tokens: [B, W] int64, the target's own token at every window row; a valid id even
            where the row is dead.
        num_accepted: [B] int64, 0..num_drafts; 0 for padding and rows with a fault.
        next_token: [B] int64, a valid id for every row; 0 for padding and rows with a fault.
        faults: [B] int64 of ``kernels.outcome``, of the rows that decided: 0..num_accepted.
            What rejected rows hold cannot reach a request.
    """

    tokens: Tensor
    num_accepted: Tensor
    next_token: Tensor
    faults: Tensor


@dataclass(frozen=True, slots=True)
class Chances:
    """Drafts are accepted by chance, whatever the target says (``kernels.acceptance``).

    Attributes:
        rates: [k] fp32, how often draft i is accepted if all before it are.
        seeds: [S] int64, 0..2^63-1, by slot: keys of the draws.
    """

    rates: Tensor
    seeds: Tensor


@dataclass(frozen=True, slots=True)
class PaddedLengths:
    """Lengths after the commit, [B] int64 each."""

    num_tokens: Tensor
    num_computed: Tensor


@triton.jit
def _judge_kernel(
    keys,  # [B, W, NUM_TILES]
    rates,  # [K], or None: drafts are judged
    seeds,  # [S], or None
    num_query,  # [B]
    num_drafts,  # [B]
    tokens,  # [B, W]
    num_accepted,  # [B]
    next_tokens,  # [B]
    faults,  # [B]
    slots,  # [B]
    staged_token_ids,  # [B, R]
    staged_num_tokens,  # [B]
    R: tl.constexpr,
    W: tl.constexpr,
    NUM_TILES: tl.constexpr,
    W_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    plan_row = tl.program_id(0).to(tl.int64)
    query, drafts = tl.load(num_query + plan_row), tl.load(num_drafts + plan_row)
    accepted, next_token, fault = judge_row(
        plan_row, keys, rates, seeds, query, drafts, slots, staged_token_ids,
        staged_num_tokens, tokens, R, W, NUM_TILES, W_BLOCK, TILE_BLOCK,
    )  # fmt: skip
    tl.store(num_accepted + plan_row, accepted)
    tl.store(next_tokens + plan_row, next_token)
    tl.store(faults + plan_row, fault)


@triton.jit
def _commit_kernel(
    num_accepted,  # [B]
    next_tokens,  # [B]
    num_query,  # [B]
    slots,  # [B]
    samples,  # [B] bool
    staged_token_ids,  # [B, R]
    staged_num_tokens,  # [B]
    staged_num_computed,  # [B]
    token_ids,  # [S, max_len]
    num_tokens,  # [S]
    num_computed,  # [S]
    new_num_tokens,  # [B]
    new_num_computed,  # [B]
    token_stride,
    R: tl.constexpr,
    W_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    plan_row = tl.program_id(0).to(tl.int64)
    commit_row(
        plan_row, tl.load(num_accepted + plan_row), tl.load(next_tokens + plan_row),
        tl.load(num_query + plan_row), slots, samples, staged_token_ids, staged_num_tokens,
        staged_num_computed, token_ids, num_tokens, num_computed, new_num_tokens,
        new_num_computed, token_stride, R, W_BLOCK,
    )  # fmt: skip


@triton.jit
def _judge_and_commit_kernel(
    keys,  # [B, W, NUM_TILES]
    rates,  # [K], or None: drafts are judged
    seeds,  # [S], or None
    num_query,  # [B]
    num_drafts,  # [B]
    tokens,  # [B, W]
    num_accepted,  # [B]
    next_tokens,  # [B]
    faults,  # [B]
    slots,  # [B]
    samples,  # [B] bool
    staged_token_ids,  # [B, R]
    staged_num_tokens,  # [B]
    staged_num_computed,  # [B]
    token_ids,  # [S, max_len]
    num_tokens,  # [S]
    num_computed,  # [S]
    new_num_tokens,  # [B]
    new_num_computed,  # [B]
    token_stride,
    R: tl.constexpr,
    W: tl.constexpr,
    NUM_TILES: tl.constexpr,
    W_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    plan_row = tl.program_id(0).to(tl.int64)
    query, drafts = tl.load(num_query + plan_row), tl.load(num_drafts + plan_row)
    accepted, next_token, fault = judge_row(
        plan_row, keys, rates, seeds, query, drafts, slots, staged_token_ids,
        staged_num_tokens, tokens, R, W, NUM_TILES, W_BLOCK, TILE_BLOCK,
    )  # fmt: skip
    tl.store(num_accepted + plan_row, accepted)
    tl.store(next_tokens + plan_row, next_token)
    tl.store(faults + plan_row, fault)
    commit_row(
        plan_row, accepted, next_token, query, slots, samples, staged_token_ids,
        staged_num_tokens, staged_num_computed, token_ids, num_tokens, num_computed,
        new_num_tokens, new_num_computed, token_stride, R, W_BLOCK,
    )  # fmt: skip


@triton.jit
def _publish_kernel(
    slots,  # [B]
    num_query,  # [B]
    samples,  # [B] bool
    new_draft_ids,  # [B, K]
    new_num_drafts,  # [B]
    draft_ids,  # [S, K], written
    num_drafts,  # [S], written
    draft_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    plan_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + plan_row)
    live = tl.load(num_query + plan_row) > 0
    count = tl.where(tl.load(samples + plan_row) != 0, tl.load(new_num_drafts + plan_row), 0)
    tl.store(num_drafts + slot, count, live)
    index = tl.arange(0, BLOCK)
    draft = tl.load(new_draft_ids + plan_row * K + index, index < K, other=0)
    tl.store(draft_ids + slot * draft_stride + index, draft, live & (index < K))


def judge(
    keys: Tensor, x: PaddedInputs, rows_per_window: int, chances: Chances | None = None
) -> Judgement:
    """Accept each window's drafts up to the first that is not the target's own token.

    Args:
        keys: [B * W, tiles] int64 of ``sampling``, window rows in order; in a chunk, whose
            W is 1, of the row of its last committed token.
        x: the step's inputs.
        rows_per_window: W, at least 1 + the largest number of drafts.
        chances: say, in place of the target, how many drafts are accepted. Tokens of accepted
            rows are then the drafts; faults are what they are without them.
    """
    judgement = _empty_judgement(x, rows_per_window)
    _judge_kernel[(x.slots.shape[0],)](
        *_judge_arguments(keys, x, judgement, chances),
        x.slots,
        x.token_ids,
        x.num_tokens,
        **_shape(keys, x, rows_per_window),
    )
    return judgement


def commit(
    sequences: Any, x: PaddedInputs, num_accepted: Tensor, next_token: Tensor
) -> PaddedLengths:
    """Make a step's accepted tokens true, as ``state.commit.commit`` does, in one launch.

    Args:
        sequences: the truth to advance (``state.sequences.Sequences``).
        x: the step's inputs.
        num_accepted: [B] int64; 0 for rows that do not sample.
        next_token: [B] int64, read only for rows that sample.
    """
    arguments, lengths = _commit_arguments(sequences, x)
    _commit_kernel[(x.slots.shape[0],)](
        num_accepted,
        next_token,
        x.num_query,
        *arguments,
        R=x.rows_per_plan_row,
        W_BLOCK=triton.next_power_of_2(sequences.max_num_drafts + 1),
        num_warps=1,
        **overlapped(x.slots),
    )
    return lengths


def judge_and_commit(
    sequences: Any,
    keys: Tensor,
    x: PaddedInputs,
    rows_per_window: int,
    chances: Chances | None = None,
) -> tuple[Judgement, PaddedLengths]:
    """``judge``, then ``commit``, in one launch."""
    judgement = _empty_judgement(x, rows_per_window)
    arguments, lengths = _commit_arguments(sequences, x)
    _judge_and_commit_kernel[(x.slots.shape[0],)](
        *_judge_arguments(keys, x, judgement, chances),
        *arguments,
        **_shape(keys, x, rows_per_window),
    )
    return judgement, lengths


def publish(sequences: Any, x: PaddedInputs, draft_ids: Tensor, num_drafts: Tensor) -> None:
    """Store drafts for the next windows; rows that do not sample get none.

    Args:
        sequences: the truth to write.
        x: the step's inputs.
        draft_ids: [B, k] int64, k at least 1.
        num_drafts: [B] int64, 0..k.
    """
    batch, k = draft_ids.shape
    assert draft_ids.is_contiguous()
    assert k == sequences.max_num_drafts > 0
    _publish_kernel[(batch,)](
        x.slots,
        x.num_query,
        x.samples,
        draft_ids,
        num_drafts,
        sequences.draft_ids,
        sequences.num_drafts,
        sequences.draft_ids.stride(0),
        K=k,
        BLOCK=triton.next_power_of_2(k),
        num_warps=1,
        **overlapped(x.slots),
    )


def _empty_judgement(x: PaddedInputs, rows_per_window: int) -> Judgement:
    batch = x.slots.shape[0]
    return Judgement(
        tokens=x.slots.new_empty(batch, rows_per_window),
        num_accepted=x.slots.new_empty(batch),
        next_token=x.slots.new_empty(batch),
        faults=x.slots.new_empty(batch),
    )


def _judge_arguments(
    keys: Tensor, x: PaddedInputs, judgement: Judgement, chances: Chances | None
) -> tuple[Tensor | None, ...]:
    rates, seeds = (None, None) if chances is None else (chances.rates, chances.seeds)
    return (
        keys,
        rates,
        seeds,
        x.num_query,
        x.num_drafts,
        judgement.tokens,
        judgement.num_accepted,
        judgement.next_token,
        judgement.faults,
    )


def _commit_arguments(
    sequences: Any, x: PaddedInputs
) -> tuple[tuple[Tensor | int, ...], PaddedLengths]:
    num_tokens, num_computed = torch.empty_like(x.slots), torch.empty_like(x.slots)
    arguments = (
        x.slots,
        x.samples,
        x.token_ids,
        x.num_tokens,
        x.num_computed,
        sequences.token_ids,
        sequences.num_tokens,
        sequences.num_computed,
        num_tokens,
        num_computed,
        sequences.token_ids.stride(0),
    )
    return arguments, PaddedLengths(num_tokens, num_computed)


def _shape(keys: Tensor, x: PaddedInputs, rows_per_window: int) -> dict[str, int]:
    """Compile-time sizes of a kernel that judges."""
    assert keys.shape[0] == x.slots.shape[0] * rows_per_window
    num_tiles = keys.shape[1]
    window = triton.next_power_of_2(rows_per_window)
    tiles = min(triton.next_power_of_2(num_tiles), max(_KEYS_AT_A_TIME // window, 1))
    return {
        "R": x.rows_per_plan_row,
        "W": rows_per_window,
        "NUM_TILES": num_tiles,
        "W_BLOCK": window,
        "TILE_BLOCK": tiles,
        "num_warps": 4,
        **overlapped(keys),
    }
