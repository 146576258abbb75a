"""Passes over prompts in the fast form beside other rows, for any recurrent rule that has one."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from helpers.recurrent import Slots, params_of
from helpers.rows import runs_of
from sametoken.ops.backend import AttentionRows, FastPrompts
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.recurrent.rule import STATE_STRIDE
from sametoken.ops.model.recurrent.triton import TritonPass

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_SLOTS, LONGEST = 4, 400
#: Slot, first position and rows of two short prompts.
OTHERS = [(0, 0, 3), (1, 0, 70)]


def empty(spec: Recurrent, begin_pass=TritonPass.begin, stride: int = STATE_STRIDE) -> Slots:
    return Slots(
        spec, 2, num_slots=NUM_SLOTS, begin_pass=begin_pass, device=DEVICE, state_stride=stride
    )


def raw_rows(spec: Recurrent, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """A row is a function of its slot and position; two rows without a run are NaN."""
    heads, generator = spec.rule.num_value_heads, torch.Generator().manual_seed(0)
    width = spec.rule.conv_channels + 2 * heads
    table = torch.randn(NUM_SLOTS, LONGEST, width, generator=generator)
    rows = [table[slot, first : first + count] for slot, first, count in parts]
    raw = torch.cat([*rows, torch.full((2, width), torch.nan)]).to(DEVICE, spec.dtype)
    return list(raw.split((spec.rule.conv_channels, heads, heads), dim=-1))


def run(cache: Slots, parts: list[tuple[int, int, int]], num_fast: int) -> list[torch.Tensor]:
    """One pass over parts (slot, first position, rows), of which the last ones are fast."""
    starts = [*accumulate((count for *_, count in parts), initial=0)]
    facts = [(slot, first + i) for slot, first, count in parts for i in range(count)]
    slots, positions = torch.tensor([*facts, *[(NUM_SLOTS, 0)] * 2], device=DEVICE).t().contiguous()
    runs = runs_of([count for *_, count in parts], 0, DEVICE)
    prompt_len = torch.zeros(NUM_SLOTS + 1, dtype=torch.int64, device=DEVICE)
    for slot, *_ in parts[len(parts) - num_fast :]:
        prompt_len[slot] = LONGEST
    fast = FastPrompts(prompt_len, LONGEST)
    rows = AttentionRows(positions, slots, slots, slots[None], runs, fast_prompts=fast)
    running = cache.begin(rows)
    params = params_of(cache.declared, device=DEVICE)
    out = cache.run(running, 0, params, *raw_rows(cache.declared, parts))
    running.finish()
    return [out[begin:end] for begin, end in pairwise(starts)]
