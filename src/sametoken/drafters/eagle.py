"""EAGLE: a small head drafts from the target's own hidden states.

Draft heads that propose some of the target's tokens alone, and read those rows of a head.

A large vocabulary's logits are most of what a small head reads, and answers are made of few
of its tokens (FR-Spec: Zhao et al., arXiv:2502.14856). The target reads its own head whole.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sametoken.drafters.base import Drafts, NoDrafter, drafts_of
from sametoken.drafters.context import Coupling, DraftContext
from sametoken.errors import ConfigError
from sametoken.io.files import read_json
from sametoken.models.heads.base import EagleHead
from sametoken.ops.step.types import Chains
from sametoken.state.caches import ModelCache

_REMEDY = "give a JSON list of token ids, as `sametoken train token-map` writes it"


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """The tokens that a file names.

    Args:
        path: a JSON list of ids, in any order.
        vocab_size: of the target; ids are below it.

    Returns:
        [V'] int64, ascending.

    Raises:
        ConfigError: the file cannot be read, or is no list of different ids of tokens.
    """
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the token map {path} cannot be read ({error})", _REMEDY) from error
    if not isinstance(found, list) or not found or not all(type(i) is int for i in found):
        raise ConfigError(f"the token map {path} is no list of integers", _REMEDY)
    low, high = min(found), max(found)
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"the token map {path} holds ids {low}..{high}, outside a vocabulary of {vocab_size}",
            "use one that was made with the target's own tokenizer",
        )
    token_ids = torch.tensor(sorted(set(found)))
    if token_ids.shape[0] != len(found):
        raise ConfigError(f"the token map {path} names a token twice", _REMEDY)
    return token_ids


class EagleDrafter:
    """Catches up on every committed row with the target's states, then drafts on its own.

    The row at p holds the token at p + 1, which is committed for every live row: the next
    prompt token at the edge of a prefill chunk. The row at ``end - 1`` gives draft 1; each
    further draft is a row at ``end`` or above with a drafted token and the head's own
    state. The next step writes all of those anew, from ``start`` on, with true tokens and
    states before any row reads them (tests/unit/drafters/test_eagle.py).

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
