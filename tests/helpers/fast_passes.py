"""Passes over prompts in the fast form beside other rows, for any recurrent rule that has one."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from helpers.recurrent import Slots, begin_as_on_a_gpu, params_of
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
    sizes = [spec.rule.conv_channels, *spec.rule.gate_sizes]
    table = torch.randn(NUM_SLOTS, LONGEST, sum(sizes), generator=torch.Generator().manual_seed(0))
    rows = [table[slot, first : first + count] for slot, first, count in parts]
    raw = torch.cat([*rows, torch.full((2, sum(sizes)), torch.nan)]).to(DEVICE, spec.dtype)
    return list(raw.split(sizes, dim=-1))


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
    params = params_of(cache.declared, limit=(0.05, 2.0), device=DEVICE)
    out = cache.run(running, 0, params, *raw_rows(cache.declared, parts))
    running.finish()
    return [out[begin:end] for begin, end in pairwise(starts)]


def require_law(patch, kernels, generate, method: str, items) -> None:
    """Require tokens of prompts by chunks: in steps of any rows, beside prompts that are walked.

    ``generate`` answers requests by a method, with options of the engine; ``kernels`` are a rule's.
    """
    ran_by_chunks, advance = [], kernels.advance_chunks

    def counted(*given):
        ran_by_chunks.append(1)
        return advance(*given)

    patch.setattr(kernels, "advance_chunks", counted)
    fast = {"fast_prompts_from": 66}
    alone = generate("plain", items, max_num_seqs=1, enforce_eager=True, **fast)
    assert ran_by_chunks
    ran = generate(method, items, max_num_seqs=len(items), max_num_batched_tokens=700, **fast)
    assert ran.tokens == alone.tokens
    assert method == "plain" or ran.offered > 0


def require_chunks(spec: Recurrent, stride: int) -> None:
    """Require prompts near the reference, and their bits in every pass.

    Not in bf16 under Triton 3.6's interpreter, which multiplies such matrices' bits as integers.
    """
    cache, oracle = empty(spec, stride=stride), empty(spec, begin_as_on_a_gpu, stride)
    parts = [*OTHERS, (3, 0, 100), (2, 0, 200)]
    for out, wanted in zip(run(cache, parts, 2), run(oracle, parts, 2), strict=True):
        assert (out.float() - wanted).abs().max() < 0.02 * wanted.abs().max()
    assert torch.equal(cache.position, oracle.position)
    cut = empty(spec, stride=stride)
    first = run(cut, [(3, 0, 64), (2, 0, 128)], 2)[1]
    second = run(cut, [*OTHERS, (2, 128, 72)], 1)[2]
    assert torch.equal(torch.cat((first, second)), run(empty(spec), [(2, 0, 200)], 1)[0])
    assert torch.equal(cut.states[:, 2], cache.states[:, 2])
