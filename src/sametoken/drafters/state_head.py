"""Heads without KV: a chain of drafts from one state of the target."""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.drafters.base import Drafter, Drafts, NoDrafter, stacked_drafts
from sametoken.drafters.context import Coupling, DraftContext
from sametoken.models.heads.state_head import StateHead


class StateDrafter(Drafter):
    """Starts each chain at the target's state at ``end - 1``, which gave the newest token.

    That row is a request's last accepted one. It is sampled, so no other states are wanted. Every
    request runs; drafts of those that do not sample are not counted.

    Args:
        head: the draft head.
        k: drafts per step.
        coupling: chooses tokens.
    """

    def __init__(self, head: StateHead, k: int, coupling: Coupling) -> None:
        self._head = head
        self._k = k
        self._coupling = coupling

    def propose(self, context: DraftContext) -> Drafts:
        """The wanted drafts for every request that samples."""
        wanted = min(self._k, context.num_wanted)
        if not wanted or not context.x.sampled.slots.shape[0]:
            return NoDrafter().propose(context)
        head, slots = self._head, context.slots
        states = head.target_states(context.hidden, _last_accepted(context))
        tokens = [context.tokens_at(slots, context.end)]
        for index in range(wanted):
            drafted = head.forward(index, tokens[-1], states)
            states, logits = drafted.feedback, head.compute_logits(index, drafted.last)
            positions = context.num_tokens + index
            tokens.append(self._coupling.choose(logits, slots, positions, head.token_ids))
        return stacked_drafts(context, tokens[1:])


def _last_accepted(context: DraftContext) -> Tensor:
    """[B] int64, each request's row at ``end - 1`` among the states; any row if it samples none."""
    x = context.x
    # A window begins with the newest token before the step.
    sampled = x.window_starts[:-1] + context.end - x.num_tokens
    sampled = torch.where(context.samples, sampled, 0)
    if x.kept is not None or x.sampled.index is None:
        return sampled
    return x.sampled.index[sampled]
