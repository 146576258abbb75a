"""What a verifier is given, kept for comparison."""

from __future__ import annotations

import torch

from sametoken.verification.base import Verdict


class RecordedLogits:
    """A verifier that keeps the raw logits of every emitted token by slot and position."""

    def __init__(self, verifier) -> None:
        self.verifier = verifier
        self.rows: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}

    def admit(self, admission) -> None:
        self.prompts[admission.slot] = admission.prompt_token_ids
        self.verifier.admit(admission)

    def score_prompt(self, hidden, x, compute_logits):
        return self.verifier.score_prompt(hidden, x, compute_logits)

    def judge(self, logits, x) -> Verdict:
        raw = logits.clone()
        verdict = self.verifier.judge(logits, x)
        for b, slot in enumerate(x.slots.tolist()):
            if not bool(x.samples[b]):
                continue
            for r in range(int(verdict.num_accepted[b]) + 1):
                position = int(x.num_tokens[b]) + r
                self.rows[self.prompts[slot], position] = raw[int(x.window_starts[b]) + r]
        return verdict
