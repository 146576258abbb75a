"""Steps run without autograd's notes, whatever thread calls the engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers.harness import Shape, build, request, run
from helpers.toy import ToyModel
from sametoken.models.base import HiddenStates


class Watched(ToyModel):
    """Keeps the hidden states of all steps, which are outputs of both halves' operations."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[torch.Tensor] = []

    def forward(self, token_ids, rows, kv, kept=None) -> HiddenStates:
        assert token_ids.is_inference()
        return super().forward(token_ids, rows, kv, kept)

    def compute_logits(self, hidden) -> torch.Tensor:
        self.logits.append(super().compute_logits(hidden))
        return self.logits[-1]


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_a_step_records_nothing_for_autograd(steps_in_flight):
    model = Watched()
    core = build(model, Shape(steps_in_flight=steps_in_flight))
    with ThreadPoolExecutor() as pool:
        ran = pool.submit(run, core, [request("r", (1, 2, 3), max_tokens=4)]).result()
    assert len(ran.tokens["r"]) == 4
    assert all(logits.is_inference() for logits in model.logits)
