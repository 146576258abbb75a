"""EAGLE: a small head drafts from the target's own hidden states."""

from __future__ import annotations

from torch import Tensor

from sametoken.drafters.base import Drafts, NoDrafter
from sametoken.drafters.chain import drafts_of
from sametoken.drafters.context import DraftContext
from sametoken.drafters.coupling import Coupling
from sametoken.kernels.step.types import Chains
from sametoken.models.eagle import EagleHead
from sametoken.state.caches import ModelCache


class EagleDrafter:
    """Catches up on every committed row with the target's states, then drafts on its own.

    The row at p holds the token at p + 1, which is committed for every live row: the next
    prompt token at the edge of a prefill chunk. The row at ``end - 1`` gives draft 1; each
    further draft is a row at ``end`` or above with a drafted token and the head's own
    state. The next step writes all of those anew, from ``start`` on, with true tokens and
    states before any row reads them (tests/unit/drafters/test_eagle_drafter.py).

    The KV at p depends on the token at p + 1, so ``lookahead_tokens`` is 1.

    Args:
        head: the draft head, of either version.
        kv_cache: its KV, with as many blocks as the target's and of the same size.
        k: drafts per step.
        coupling: how tokens are chosen.
    """

    lookahead_tokens = 1

    def __init__(self, head: EagleHead, kv_cache: ModelCache, k: int, coupling: Coupling) -> None:
        self.kv_caches: tuple[ModelCache, ...] = (kv_cache,)
        # Drafts 1 .. k - 1 are run in their turn, the first of them at num_tokens - 1.
        self.lookahead_slots = max(k - 2, 0)
        self._head = head
        self._k = k
        self._coupling = coupling

    def propose(self, context: DraftContext) -> Drafts:
        """k drafts for every row that samples; the other rows only catch up."""
        (kv_cache,) = self.kv_caches
        live = context.catch_up()
        given = self._head.target_states(context.hidden, live.source)
        chains = live.chains
        # The other rows are run for their KV alone.
        states = self._head.forward(live.token_ids, given, live.rows, kv_cache, chains.last)
        if not chains.last.numel():
            return NoDrafter().propose(context)
        tokens = [self._choose(states.last, chains)]
        while len(tokens) < self._k:
            states = self._head.forward(tokens[-1], states.feedback, chains.rows, kv_cache)
            chains = context.advanced(chains)
            tokens.append(self._choose(states.last, chains))
        return drafts_of(context, chains, tokens)

    def _choose(self, last: Tensor, chains: Chains) -> Tensor:
        logits = self._head.compute_logits(last)
        slots, token_ids = chains.rows.slots, self._head.token_ids
        return self._coupling.choose(logits, slots, chains.following, token_ids)
