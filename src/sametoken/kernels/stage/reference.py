"""Stage in plain PyTorch; also the CPU path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def stage(sequences: Any, plan: Tensor) -> dict[str, Any]:
    """Fields of ``StepInputs`` (all but the step id) for the given plan rows.

    A row that samples offers ``min(num_drafts[slot], draft_limit)`` drafts; others none.

    Args:
        sequences: the device's truth (``state.sequences.Sequences``).
        plan: [B, 4] int64 on the device: slot, num_query, draft_limit, samples of each row.
    """
    # Kernels read the columns by address, so each must be contiguous.
    slots, num_query, draft_limit, samples = plan.t().contiguous().unbind(0)
    samples = samples.bool()
    num_computed = sequences.num_computed[slots]
    num_drafts = torch.minimum(sequences.num_drafts[slots], draft_limit) * samples

    num_rows = num_query + num_drafts
    row_starts = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0))
    row_owner = torch.repeat_interleave(num_rows)
    offset = torch.arange(row_owner.shape[0], device=plan.device) - row_starts[row_owner]
    positions = num_computed[row_owner] + offset
    row_slots = slots[row_owner]

    draft_index = offset - num_query[row_owner]
    is_draft = draft_index >= 0
    token_ids = sequences.token_ids[row_slots, positions]
    token_ids[is_draft] = sequences.draft_ids[row_slots[is_draft], draft_index[is_draft]]

    judged = samples[row_owner] & (draft_index >= -1)
    window_width = (num_drafts + 1) * samples
    return {
        "slots": slots,
        "num_tokens": sequences.num_tokens[slots],
        "num_computed": num_computed,
        "num_query": num_query,
        "num_drafts": num_drafts,
        "samples": samples,
        "row_starts": row_starts,
        "token_ids": token_ids,
        "rows": sequences.rows_at(row_slots, positions, committed=~is_draft),
        "row_owner": row_owner,
        "logits_indices": judged.nonzero().squeeze(1),
        "window_starts": window_width.cumsum(0) - window_width,
    }
