"""Losses against a target's distribution: of rows, and of a head in training-time test."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sametoken.train.acceptance import count_accepted
from sametoken.train.batches import Batch, DraftRows
from sametoken.train.compute import Compute
from sametoken.train.distillation import Distillation, VerifiedDrafts
from sametoken.train.progress import StepLoss
from sametoken.train.states import BatchStates, Target
from sametoken.train.token_map import membership
from sametoken.train.unrolled import DraftModule

# Logits held at once: they fit a CPU's cache, and fill a GPU.
_CPU_LOGITS, _GPU_LOGITS = 2**20, 2**28


@dataclass(frozen=True, slots=True)
class Unroll:
    """How many drafts in a row are trained, and the weight of each loss over the one before."""

    steps: int
    decay: float


class HeadNetwork(DraftModule):
    """A trainable head over the target's states."""

    @property
    @abstractmethod
    def draft_head(self) -> Tensor:
        """[draft vocabulary, hidden], the projection to logits."""


class HeadObjective(Distillation):
    """The loss of training-time test.

    The loss of a draft is the cross entropy between the target's distribution over the draft
    vocabulary and the head's, over rows whose most likely token is in that vocabulary. Draft i
    has the weight ``decay ** i``.

    Args:
        network: the head.
        target: its embedding and logits.
        token_ids: [D] int64, the draft vocabulary.
        unroll: the number of drafts and their weights.
        compute: the precision.
    """

    def __init__(
        self,
        network: HeadNetwork,
        target: Target,
        token_ids: Tensor,
        unroll: Unroll,
        compute: Compute,
    ) -> None:
        super().__init__(network, unroll.steps)
        device = target.embedding.device
        self._head = network
        self._embedding = target.embedding
        self._decay = unroll.decay
        self._compute = compute
        self._token_ids = token_ids.to(device)
        self._inside = membership(token_ids, target.config.vocab_size).to(device)
        self._draft_rows = target.head[self._token_ids]

    def batch_loss(self, batch: Batch, states: BatchStates) -> tuple[StepLoss, VerifiedDrafts]:
        """The loss of a batch, and how its drafts were verified."""
        rows, k, dtype = DraftRows.of(batch), self.k, self._compute.dtype
        wanted = states.last.flatten(0, 1)[rows.flat + 1] @ self._draft_rows.T
        probabilities = wanted.float().softmax(-1)
        following = states.greedy.flatten()[rows.flat + 1]
        # The text continues with the target's token, so that a chain can pass this row.
        agrees = following == batch.token_ids.flatten()[rows.flat + 2]
        losses: list[Tensor] = []
        correct = torch.zeros((k, rows.flat.shape[0]), dtype=torch.bool, device=rows.flat.device)
        with self._compute.autocast():
            outputs = self._head.unroll(self._embedding, batch.token_ids, states.auxiliary, k)
            for draft, last in enumerate(outputs):
                # Draft d of row i is at the position of the first draft of row i + d, if both rows
                # belong to one sequence.
                num_rows = max(rows.flat.shape[0] - draft, 0)
                live = draft < rows.left[:num_rows]
                counted = live & self._inside[following[draft:]]
                loss, chosen = verify_rows(
                    last.flatten(0, 1).index_select(0, rows.flat[:num_rows]).to(dtype),
                    self._head.draft_head.to(dtype),
                    probabilities[draft:],
                    counted,
                )
                losses.append(loss)
                correct[draft, :num_rows] = self._token_ids[chosen] == following[draft:]
        weights = [self._decay**draft for draft in range(k)]
        total = torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum()
        acceptance, num_accepted = count_accepted(correct, rows.goes_on(agrees, k))
        return StepLoss(total / sum(weights), acceptance), VerifiedDrafts(num_accepted, rows.counts)


def verify_rows(
    last: Tensor, weight: Tensor, probabilities: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of the logits ``last @ weight.T``, and the most likely column of each row.

    The forward pass also computes the gradient of every logit, a few rows at a time. That keeps
    two bytes per logit in bf16, where autograd would keep several fp32 tensors.

    Args:
        last: [M, hidden], differentiated.
        weight: [D, hidden] of the same dtype, differentiated if it needs to be.
        probabilities: [M, D] fp32, the target's distributions; a row sums to 1.
        counted: [M] bool, rows that count in the loss.

    Returns:
        The mean over counted rows of ``-sum(probabilities * log_softmax(logits))``, a scalar
        fp32, 0 if none is counted; and [M] int64.
    """
    found: tuple[Tensor, Tensor] = _JudgedRows.apply(  # type: ignore[no-untyped-call, unused-ignore]
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
