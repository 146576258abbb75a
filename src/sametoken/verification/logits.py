"""Logits processing: every window row with its own accepted prefix.

The order is vLLM's: allowed ids, bad words, min_tokens, logit_bias, repetition, frequency
and presence penalties, temperature, min_p, top_k, top_p. Grammars come after the penalties.
Rows of requests that use none of these keep their bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.kernels.interface import Kernels
from sametoken.state.inputs import StepInputs
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.verification.grammar import SlotGrammars
from sametoken.verification.rules import apply_rules


def process_logits(
    logits: Tensor,
    x: StepInputs,
    sequences: Sequences,
    table: SamplingTable,
    kernels: Kernels,
    grammars: SlotGrammars | None = None,
) -> Tensor:
    """Apply the requests' parameters to a step's logits, in place.

    Temperature enters only as far as the cuts need it; the division itself is the
    sampling kernel's.

    Args:
        logits: [L, V] fp32, written.
        x: the step's inputs.
        sequences: the committed tokens, before the step's commit.
        table: the slots' parameters.
        kernels: cut off unlikely tokens.
        grammars: the slots' grammars, which take up committed tokens here; None for none.

    Returns:
        [L] int64: why a row of a grammar has no token left (``Stuck``).
    """
    if table.rules:
        _apply_slot_rules(logits, x, sequences, table)
    if grammars is None:
        stuck = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    else:
        stuck = grammars.mask(logits, x)
    kernels.truncate(logits, x.slots[x.logits_owner], table.cuts)
    return stuck


def _apply_slot_rules(
    logits: Tensor, x: StepInputs, sequences: Sequences, table: SamplingTable
) -> None:
    columns = (x.slots, x.window_starts, x.num_drafts, x.num_tokens, sequences.prompt_len[x.slots])
    plan_rows = torch.stack(columns, dim=1)[x.samples].tolist()
    window_ids = x.token_ids[x.logits_indices]
    for slot, start, num_drafts, num_tokens, prompt_len in plan_rows:
        rules = table.rules.get(slot)
        if rules is None:
            continue
        end = start + num_drafts + 1
        committed = sequences.token_ids[slot, :num_tokens]
        tokens = torch.cat((committed, window_ids[start + 1 : end]))
        apply_rules(logits[start:end], tokens, num_tokens, prompt_len, rules)
