"""Cross entropy against a target's distribution, without logits of all rows at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Logits held at once: on a CPU what its cache holds, on a GPU enough to fill it.
_CPU_LOGITS, _GPU_LOGITS = 2**20, 2**28


def judge_rows(
    last: Tensor, weight: Tensor, probabilities: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of the logits ``last @ weight.T``, and the most likely column of each row.

    Gradients are made beside the loss, a few rows at a time, and kept as products of them:
    that takes two bytes a logit in bf16 where autograd would keep several fp32 tensors.

    Args:
        last: [M, hidden], differentiated.
        weight: [D, hidden] of the same dtype, differentiated if it needs to be.
        probabilities: [M, D] fp32, what each row should say; a row sums to 1.
        counted: [M] bool, rows that the loss counts.

    Returns:
        The mean over counted rows of ``-sum(probabilities * log_softmax(logits))``, a scalar
        fp32, 0 if none is counted; and [M] int64.
    """
    found: tuple[Tensor, Tensor] = _JudgedRows.apply(  # type: ignore[no-untyped-call]
        last, weight, probabilities, counted
    )
    return found


class _JudgedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, last: Tensor, weight: Tensor, probabilities: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_rows, width = probabilities.shape
        share = counted / counted.sum().clamp(min=1)
        slopes = last.new_empty(num_rows, width)
        losses = share.new_empty(num_rows)
        chosen = torch.empty(num_rows, dtype=torch.int64, device=last.device)
        at_once = max((_GPU_LOGITS if last.is_cuda else _CPU_LOGITS) // width, 1)
        with torch.autocast(last.device.type, enabled=False):
            for first in range(0, num_rows, at_once):
                rows = slice(first, first + at_once)
                logits = (last[rows] @ weight.T).float()
                chosen[rows] = logits.argmax(-1)
                total = logits.logsumexp(-1)
                losses[rows] = total - (probabilities[rows] * logits).sum(-1)
                slope = (logits - total[:, None]).exp_().sub_(probabilities[rows])
                slopes[rows] = slope.mul_(share[rows, None])
        ctx.save_for_backward(last, weight, slopes)
        ctx.mark_non_differentiable(chosen)
        return losses @ share, chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        last, weight, slopes = ctx.saved_tensors
        scale, for_weight = gradients[0], None
        with torch.autocast(last.device.type, enabled=False):
            for_last = (slopes @ weight) * scale.to(last.dtype)
            if ctx.needs_input_grad[1]:
                for_weight = (slopes.T @ last) * scale.to(weight.dtype)
        return for_last, for_weight, None, None
