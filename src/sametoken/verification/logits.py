"""Logits processing: every window row with its own accepted prefix.

The order is vLLM's: allowed ids, bad words, min_tokens, logit_bias, repetition, frequency
and presence penalties, temperature, min_p, top_k, top_p. Grammars come after the penalties.
Rows of requests that use none of these keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sametoken.kernels.interface import Kernels, SampledRows
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences


def forbid_nothing(logits: Tensor) -> Tensor:
    """The mask of a step without grammars: [L, V] to [L] int64, no row stuck (``Stuck``)."""
    return torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)


def process_logits(
    logits: Tensor,
    rows: SampledRows,
    sequences: Sequences,
    table: SamplingTable,
    kernels: Kernels,
    mask: Callable[[Tensor], Tensor] = forbid_nothing,
) -> Tensor:
    """Apply the requests' parameters to a step's logits, in place.

    Temperature enters only as far as the cuts need it; the division itself is the
    sampling kernel's.

    Args:
        logits: [L, V] fp32, written.
        rows: where the logits rows stand; live ones alone, or dead ones among them.
        sequences: the committed tokens, before the step's commit.
        table: the slots' parameters.
        kernels: apply the rules, and cut off unlikely tokens.
        mask: forbids what grammars do, in place, and says which rows have no token left.

    Returns:
        [L] int64: why a row of a grammar has no token left (``Stuck``).
    """
    kernels.apply_rules(logits, rows, sequences, table.rules)
    stuck = mask(logits)
    kernels.truncate(logits, rows.slots, table.cuts)
    return stuck
