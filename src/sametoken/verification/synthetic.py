"""Synthetic acceptance: drafts accepted by chance at given rates, to measure times alone.

The target's logits are computed and its tokens chosen as ever, so that a step takes the time
it takes; but which drafts are accepted is drawn, and what is emitted means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sametoken.config import SpeculativeConfig
from sametoken.core.plan import Admission
from sametoken.kernels.acceptance import reference
from sametoken.kernels.interface import Kernels
from sametoken.state.inputs import StepInputs
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.verification.base import TokenLogprobs, Verdict
from sametoken.verification.keyed import KeyedVerifier
from sametoken.verification.windows import settle, window_offsets


def conditional_rates(unconditional: Sequence[float], device: torch.device) -> Tensor:
    """[k] fp32: how often draft i is accepted if all before it are. Made once, on start-up.

    Args:
        unconditional: k rates from 0 to 1, none above the one before it: how often draft i
            and all before it are accepted (``SpeculativeConfig.synthetic_rates``).
        device: where ``synthetic_accepted`` will run.
    """
    before = (1.0, *unconditional)
    rates = [
        rate / last if last else 0.0 for rate, last in zip(unconditional, before, strict=False)
    ]
    return torch.tensor(rates, dtype=torch.float32, device=device)


def synthetic_accepted(
    rates: Tensor, seeds: Tensor, positions: Tensor, num_drafts: Tensor
) -> Tensor:
    """How many drafts of each window are accepted, drawn by seed and position.

    A pure function of fixed shape: it never synchronises with the host and may be captured
    in a graph. On a CUDA device it is one kernel, elsewhere plain PyTorch, with equal
    results. The noise at a position is a function of (seed, position), so any run of the
    same requests draws the same, whatever runs beside them.

    Args:
        rates: [k] fp32 of ``conditional_rates``.
        seeds: [B] int64, of the windows' slots.
        positions: [B] int64, where each window's draft 1 would stand: ``num_tokens`` before
            the step.
        num_drafts: [B] int64, 0..k; 0 for padding and for rows without a window.

    Returns:
        [B] int64, 0..num_drafts. For an accepted draft the draft itself is emitted; the
        token after them is the target's own at that window row.
    """
    if rates.is_cuda:
        from sametoken.kernels.acceptance import triton

        return triton.accepted(rates, seeds, positions, num_drafts)
    return reference.accepted(rates, seeds, positions, num_drafts)


class SyntheticVerifier:
    """``Verifier`` by synthetic acceptance; contracts are those of the protocol.

    Args:
        keyed: computes what real verification computes.
        table: the slots' seeds.
        rates: [k] fp32 of ``conditional_rates``.
    """

    def __init__(self, keyed: KeyedVerifier, table: SamplingTable, rates: Tensor) -> None:
        self.grammars = keyed.grammars
        self._keyed = keyed
        self._table = table
        self._rates = rates

    def admit(self, admission: Admission) -> None:
        """Take up a slot's sampling parameters."""
        self._keyed.admit(admission)

    def judge(self, logits: Tensor, x: StepInputs) -> Verdict:
        """Judge by chance; next tokens, NaN and log-probabilities are real.

        Args:
            logits: [L, V] fp32; overwritten where a request's parameters change them.
            x: the step's inputs.
        """
        # NaN in any row decides here: which rows emit tokens was not known to ``keyed``.
        has_nan = logits.amax(dim=-1).isnan()
        verdict = self._keyed.judge(logits, x)
        drawn = synthetic_accepted(
            self._rates, self._table.seed[x.slots], x.num_tokens, x.num_drafts
        )
        settled = settle(x, verdict.tokens, has_nan, drawn)
        # Commit makes the accepted drafts true: they are what the host must hear of.
        drafts = x.token_ids[x.logits_indices].roll(-1)
        accepted = window_offsets(x) < settled.num_accepted[x.logits_owner]
        return replace(
            verdict,
            num_accepted=settled.num_accepted,
            next_token=settled.next_token,
            tokens=torch.where(accepted, drafts, verdict.tokens),
            poisoned=settled.poisoned,
        )

    def score_prompt(
        self, hidden: Tensor, x: StepInputs, compute_logits: Callable[[Tensor], Tensor]
    ) -> TokenLogprobs | None:
        """As in keyed verification."""
        return self._keyed.score_prompt(hidden, x, compute_logits)


def make_verifier(
    config: SpeculativeConfig | None, kernels: Kernels, sequences: Sequences, table: SamplingTable
) -> KeyedVerifier | SyntheticVerifier:
    """The verifier that a speculative config asks for: keyed, unless it says synthetic."""
    keyed = KeyedVerifier(kernels, sequences, table)
    if config is None or config.synthetic_rates is None:
        return keyed
    rates = conditional_rates(config.synthetic_rates, sequences.num_tokens.device)
    return SyntheticVerifier(keyed, table, rates)
