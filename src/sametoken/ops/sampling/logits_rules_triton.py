"""Masks, biases and penalties in Triton, with the bits of ``logits_rules_reference``.

Every length is read on the device, so the host never waits. Edits are one launch with a program
per row. Penalties are three: zero the counters, count committed tokens, apply them over rows and
columns. Counts are integers, so their order of addition does not matter, and products are not
fused with sums (``enable_fp_fusion``): a row's bits depend neither on tiles nor on the batch.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import SampledRows
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.sampling.logits_rules import HEADER_SIZE, WORD_BITS, CommittedTokens, LogitsRules

_LANES, _BAD_WORDS, _IDS = 4096, 64, 512
_BLOCK = 2048

# Enough to fill the chip; most further programs would be idle.
_PROGRAMS = 4096
# Bounds the memory of the counters: 64 x 150k int32 are 38 MB.
_COUNTERS_AT_A_TIME = 64

_HEADER_SIZE = tl.constexpr(HEADER_SIZE)
_WORD_BITS = tl.constexpr(WORD_BITS)
_IN_PROMPT = tl.constexpr(1 << 30)


def apply_rules(
    logits: Tensor, rows: SampledRows, committed: CommittedTokens, rules: LogitsRules
) -> None:
    """See ``logits_rules_reference.apply_rules``."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    if not logits.shape[0]:
        return
    if rules.edits:
        _edit(logits, rows, committed, rules)
    num_counters = max(rules.counters.values(), default=-1) + 1
    for first in range(0, num_counters, _COUNTERS_AT_A_TIME):
        size = min(_COUNTERS_AT_A_TIME, num_counters - first)
        counts = torch.zeros(size, logits.shape[1], dtype=torch.int32, device=logits.device)
        _penalise(logits, rows, committed, rules, counts, first)


def _edit(
    logits: Tensor, rows: SampledRows, committed: CommittedTokens, rules: LogitsRules
) -> None:
    num_rows, vocab_size = logits.shape
    _edit_kernel[(num_rows,)](
        logits,
        rows.slots,
        rows.positions,
        rows.token_ids,
        rows.offsets,
        committed.token_ids,
        committed.prompt_len,
        rules.edit_addresses,
        vocab_size,
        committed.token_ids.stride(0),
        LANES=_LANES,
        BAD_WORDS=_BAD_WORDS,
        IDS=_IDS,
        num_warps=8,
        **pdl_options(logits),
    )


def _penalise(
    logits: Tensor,
    rows: SampledRows,
    committed: CommittedTokens,
    rules: LogitsRules,
    counts: Tensor,
    first: int,
) -> None:
    """Penalise the rows whose counters are ``first .. first + len(counts) - 1``."""
    num_rows, vocab_size = logits.shape
    max_len = committed.token_ids.stride(0)
    programs = max(_PROGRAMS // num_rows, 1)
    _count_kernel[(num_rows, min(programs, triton.cdiv(max_len, _BLOCK)))](
        rows.slots,
        rows.positions,
        rows.offsets,
        committed.token_ids,
        committed.prompt_len,
        rules.counter_of,
        counts,
        first,
        counts.shape[0],
        vocab_size,
        max_len,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl_options(logits),
    )
    _penalise_kernel[(num_rows, min(programs, triton.cdiv(vocab_size, _BLOCK)))](
        logits,
        rows.slots,
        rows.token_ids,
        rows.offsets,
        rules.counter_of,
        rules.repetition,
        rules.frequency,
        rules.presence,
        counts,
        first,
        counts.shape[0],
        vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
        **(pdl_options(logits) | {"enable_fp_fusion": False}),
    )


@triton.jit
def _edit_kernel(
    logits,  # [L, V], written
    slots,  # [L]
    positions,  # [L]
    row_tokens,  # [L]
    offsets,  # [L]
    token_ids,  # [S, max_len]
    prompt_len,  # [S]
    edit_addresses,  # [S]
    vocab_size,  # V
    max_len,
    LANES: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    address = tl.load(edit_addresses + slot)
    if address != 0:
        edits = address.to(tl.pointer_type(tl.int64))
        position, offset = tl.load(positions + row), tl.load(offsets + row)
        output = position + 1 - tl.load(prompt_len + slot)
        _edit_row(
            logits + row * vocab_size, row_tokens + row, token_ids + slot * max_len, edits,
            position, offset, output, vocab_size, LANES, BAD_WORDS, IDS,
        )  # fmt: skip


@triton.jit
def _edit_row(
    row,  # [V], written
    row_token,  # pointer to the row's own token; the ``offset`` before it are its window's
    committed,  # [max_len], the slot's
    edits,  # the slot's packed row
    position,
    offset,
    output,  # number of output tokens before the sampled one
    vocab_size,  # V
    LANES: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    IDS: tl.constexpr,
):
    # In the order of logits_rules.Header.
    min_tokens = tl.load(edits)
    num_banned, num_stops = tl.load(edits + 3), tl.load(edits + 4)
    num_biases, num_mask_words = tl.load(edits + 5), tl.load(edits + 6)
    num_bad_words, longest = tl.load(edits + 7), tl.load(edits + 8)
    forbidden_ids = edits + _HEADER_SIZE
    bias_ids = forbidden_ids + num_banned + num_stops
    mask_words = bias_ids + 2 * num_biases
    bad_words = mask_words + num_mask_words

    if num_banned + num_stops + num_mask_words + num_bad_words > 0:
        early = output < min_tokens
        num_forbidden = tl.where(early, num_banned + num_stops, num_banned)
        if num_mask_words > 0:
            _forbid_all_but(row, mask_words, num_mask_words, vocab_size, LANES)
        _forbid(row, forbidden_ids, num_forbidden, vocab_size, IDS)
        _forbid_completions(
            row, row_token, committed, edits, bad_words, num_bad_words, longest,
            position, offset, output, BAD_WORDS,
        )  # fmt: skip
        # Stores of other threads above are read below.
        tl.debug_barrier()
        if _has_no_valid_token(row, vocab_size, LANES):
            lowest = tl.load(edits + tl.where(early, 2, 1))
            tl.store(row + lowest, 0.0)
        tl.debug_barrier()
    for first in range(0, num_biases, IDS):
        place = first + tl.arange(0, IDS)
        inside = place < num_biases
        token = tl.load(bias_ids + place, inside, other=0)
        bits = tl.load(bias_ids + num_biases + place, inside, other=0).to(tl.int32)
        biased = tl.load(row + token, inside, other=0.0) + bits.to(tl.float32, bitcast=True)
        tl.store(row + token, biased, inside)


@triton.jit
def _forbid_all_but(row, mask_words, num_mask_words, vocab_size, LANES: tl.constexpr):
    """Write -inf for ids whose bit is not set."""
    for start in range(0, vocab_size, LANES):
        token = start + tl.arange(0, LANES)
        word = token // _WORD_BITS
        bits = tl.load(mask_words + word, word < num_mask_words, other=0)
        is_allowed = ((bits >> (token % _WORD_BITS)) & 1) != 0
        tl.store(row + token, float("-inf"), (token < vocab_size) & ~is_allowed)


@triton.jit
def _forbid(row, forbidden_ids, num_forbidden, vocab_size, IDS: tl.constexpr):
    """Write -inf for a list of ids; skips ids beyond the vocabulary."""
    for first in range(0, num_forbidden, IDS):
        place = first + tl.arange(0, IDS)
        token = tl.load(forbidden_ids + place, place < num_forbidden, other=vocab_size)
        tl.store(row + token, float("-inf"), token < vocab_size)


@triton.jit
def _forbid_completions(
    row,  # this and the next three as in _edit_row
    row_token,
    committed,
    edits,
    bad_words,  # their offsets in the packed row, then their numbers of tokens
    num_bad_words,
    longest,
    position,
    offset,
    output,
    BAD_WORDS: tl.constexpr,
):
    """Write -inf for the last token of each bad word whose other tokens end the output."""
    reach = tl.minimum(longest - 1, output)
    for first in range(0, num_bad_words, BAD_WORDS):
        place = first + tl.arange(0, BAD_WORDS)
        inside = place < num_bad_words
        begin = edits + tl.load(bad_words + place, inside, other=0)
        num_before = tl.load(bad_words + num_bad_words + place, inside, other=1) - 1
        matches = inside & (num_before <= output)
        for back in range(reach):
            # Drafts and the last committed token come from the window, earlier ones from the slot.
            in_window = back <= offset
            drafted = tl.load(row_token - back, in_window, other=0)
            token = tl.load(committed + position - back, ~in_window, other=0)
            token = tl.where(in_window, drafted, token)
            needed = matches & (back < num_before)
            expected = tl.load(begin + num_before - 1 - back, needed, other=0)
            matches = matches & (~needed | (expected == token))
        last = tl.load(begin + num_before, matches, other=0)
        tl.store(row + last, float("-inf"), matches)


@triton.jit
def _has_no_valid_token(row, vocab_size, LANES: tl.constexpr):
    """Whether all logits are -inf. Stops at the first tile with a valid token, mostly the first."""
    start, found = 0, 0
    while (start < vocab_size) & (found == 0):
        token = start + tl.arange(0, LANES)
        value = tl.load(row + token, token < vocab_size, other=float("-inf"))
        found = tl.max((value != float("-inf")).to(tl.int32), axis=0)
        start += LANES
    return found == 0


@triton.jit(do_not_specialize=["first_counter", "num_counters"])
def _count_kernel(
    slots,  # [L]
    positions,  # [L]
    offsets,  # [L]
    token_ids,  # [S, max_len]
    prompt_len,  # [S]
    counter_of,  # [S]
    counts,  # [num_counters, V], zeros; written
    first_counter,
    num_counters,
    vocab_size,  # V
    max_len,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count committed tokens in the output and set a bit for those in the prompt.

    Only a window's first row counts.
    """
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    counter = tl.load(counter_of + slot) - first_counter
    counts_here = (counter >= 0) & (counter < num_counters) & (tl.load(offsets + row) == 0)
    if counts_here:
        num_tokens = tl.load(positions + row) + 1
        first_output = tl.load(prompt_len + slot)
        ours = counts + counter * vocab_size
        step = tl.num_programs(1) * BLOCK
        for start in range(tl.program_id(1) * BLOCK, num_tokens, step):
            position = start + tl.arange(0, BLOCK)
            inside = position < num_tokens
            token = tl.load(token_ids + slot * max_len + position, inside, other=0)
            in_prompt = position < first_output
            tl.atomic_or(ours + token, _IN_PROMPT, inside & in_prompt, sem="relaxed")
            tl.atomic_add(ours + token, 1, inside & ~in_prompt, sem="relaxed")


@triton.jit(do_not_specialize=["first_counter", "num_counters"])
def _penalise_kernel(
    logits,  # [L, V], written
    slots,  # [L]
    row_tokens,  # [L]
    offsets,  # [L]
    counter_of,  # [S]
    repetition,  # [S]
    frequency,  # [S]
    presence,  # [S]
    counts,  # [num_counters, V]
    first_counter,
    num_counters,
    vocab_size,  # V
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the drafts before a row to its counts, then penalise the counted tokens."""
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    counter = tl.load(counter_of + slot) - first_counter
    if (counter >= 0) & (counter < num_counters):
        num_drafts = tl.load(offsets + row)
        factor = tl.load(repetition + slot)
        per_time, once = tl.load(frequency + slot), tl.load(presence + slot)
        step = tl.num_programs(1) * BLOCK
        for start in range(tl.program_id(1) * BLOCK, vocab_size, step):
            token = start + tl.arange(0, BLOCK)
            inside = token < vocab_size
            seen = tl.load(counts + counter * vocab_size + token, inside, other=0)
            for back in range(num_drafts):
                seen += (token == tl.load(row_tokens + row - back)).to(tl.int32)
            named = inside & (seen != 0)
            at = logits + row * vocab_size + token
            value = tl.load(at, named, other=0.0)
            value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
            times = seen & (_IN_PROMPT - 1)
            lowered = value - times.to(tl.float32) * per_time - once
            tl.store(at, tl.where(times > 0, lowered, value), named)
