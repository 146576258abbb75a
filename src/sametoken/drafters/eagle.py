"""EAGLE: a small head drafts from the target's hidden states."""

from __future__ import annotations

from torch import Tensor

from sametoken.drafters.base import Drafts, NoDrafter, drafts_of
from sametoken.drafters.context import Coupling, DraftContext
from sametoken.models.heads.base import EagleHead
from sametoken.ops.step.types import Chains
from sametoken.state.caches import ModelCache


class EagleDrafter:
    """Runs committed rows with the target's states, then drafted rows with the head's own.

    The row at p holds the token at p + 1, which is committed for every live row; at the end of a
    prefill chunk it is the next prompt token. The row at ``end - 1`` gives draft 1; each further
    draft is a row at ``end`` or above with a drafted token and the head's state. The next step
    recomputes those from ``num_computed`` on, with committed tokens and the target's states, before
    any row reads them (tests/unit/drafters/test_eagle.py).

    The KV at p depends on the token at p + 1, so ``lookahead_tokens`` is 1.

    Args:
        head: the draft head.
        kv_cache: its KV, with the target's number and size of blocks.
        k: drafts per step.
        coupling: chooses tokens.
    """

    lookahead_tokens = 1

    def __init__(self, head: EagleHead, kv_cache: ModelCache, k: int, coupling: Coupling) -> None:
        self.kv_caches: tuple[ModelCache, ...] = (kv_cache,)
        self.lookahead_slots = lookahead_slots(k)
        self._head = head
        self._k = k
        self._coupling = coupling

    def propose(self, context: DraftContext) -> Drafts:
        """The wanted drafts for every request that samples; the others only catch up."""
        (kv_cache,) = self.kv_caches
        live = context.catch_up()
        target_states = self._head.target_states(context.hidden, live.source)
        chains = live.chains
        # Rows outside chains.last are run only for their KV.
        states = self._head.forward(live.token_ids, target_states, live.rows, kv_cache, chains.last)
        wanted = min(self._k, context.num_wanted)
        if not wanted or not chains.last.index.numel():
            return NoDrafter().propose(context)
        tokens = [self._choose(states.last, chains)]
        while len(tokens) < wanted:
            states = self._head.forward(tokens[-1], states.feedback, chains.rows, kv_cache)
            chains = context.advanced(chains)
            tokens.append(self._choose(states.last, chains))
        return drafts_of(context, chains, tokens)

    def _choose(self, last: Tensor, chains: Chains) -> Tensor:
        logits = self._head.compute_logits(last)
        slots, token_ids = chains.rows.slots, self._head.token_ids
        return self._coupling.choose(logits, slots, chains.following, token_ids)


def lookahead_slots(k: int) -> int:
    """See ``Drafter``: drafts 1 .. k - 1 are run, the first of them at ``num_tokens - 1``."""
    return max(k - 2, 0)
