"""The raw logits of every emitted token, from eager verbs and out of replayed graphs alike."""

from __future__ import annotations

import dataclasses

import torch

from helpers.harness import run
from helpers.recorded import RecordedLogits
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore
from sametoken.runner.runner import StepRunner

# Of any run here: the longest takes some 6,000.
MAX_STEPS = 20_000

Rows = dict[tuple[tuple[int, ...], int], torch.Tensor]


@dataclasses.dataclass
class Recording:
    """Tokens by request, and logits [V] fp32 by prompt and position of the token chosen."""

    tokens: dict[str, list[int]]
    rows: Rows
    offered: int = 0
    accepted: int = 0


class GraphTap:
    """Copies the logits that each replayed graph has computed.

    A graph computes at fixed addresses: what is held of its capture is where every replay
    leaves its logits, for as long as somebody holds it.
    """

    def __init__(self, monkeypatch) -> None:
        # Triton is part of CUDA builds of torch alone.
        from sametoken.runner.graphs import StepGraphs

        self.prompts: dict[int, tuple[int, ...]] = {}
        self._held, self._latest, self._copies = {}, (), []
        capture, replay = StepGraphs._capture, StepGraphs._replay
        run_forward = StepGraphs._forward

        def forward(graphs, *arguments):
            computed = run_forward(graphs, *arguments)
            # A copy, for rules and truncation are written into the logits.
            self._latest = (computed.logits.clone(), computed.slots, computed.positions)
            return computed

        def captured(graphs, bucket, *rest):
            step = capture(graphs, bucket, *rest)
            self._held[bucket] = self._latest
            return step

        def replayed(graphs, bucket, *rest):
            outcome = replay(graphs, bucket, *rest)
            # Steps run in order: a position's last copy is from the step that emitted it.
            self._copies.append((dict(self.prompts), *(t.clone() for t in self._held[bucket])))
            return outcome

        monkeypatch.setattr(StepGraphs, "_forward", forward)
        monkeypatch.setattr(StepGraphs, "_capture", captured)
        monkeypatch.setattr(StepGraphs, "_replay", replayed)

    def rows(self) -> Rows:
        found = {}
        for prompts, logits, slots, positions in self._copies:
            for row, where in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
                if where[0] in prompts:
                    found[prompts[where[0]], where[1] + 1] = logits[row]
        return found


def record(items, monkeypatch=None, **options) -> Recording:
    """Answer requests of different prompts; with ``monkeypatch`` graphs are recorded too."""
    assert len({item.prompt_token_ids for item in items}) == len(items)
    tap = GraphTap(monkeypatch) if monkeypatch else None
    core = build_engine(EngineConfig.from_options(**options))
    verifier = _recorded(core)
    if tap is not None:
        tap.prompts = verifier.prompts
    found = drive(core, items)
    if tap is not None:
        found.rows |= tap.rows()
    found.rows |= verifier.rows
    return found


def drive(core: EngineCore, items) -> Recording:
    """Run requests to their lengths."""
    ran = run(core, items, MAX_STEPS)
    return Recording(ran.tokens, {}, ran.offered, ran.accepted)


def _recorded(core: EngineCore) -> RecordedLogits:
    runner = core._runner
    is_eager = isinstance(runner, StepRunner)
    eager = runner if is_eager else runner.eager
    verifier = RecordedLogits(eager.verifier)
    eager = dataclasses.replace(eager, verifier=verifier)
    core._runner = eager if is_eager else dataclasses.replace(runner, eager=eager)
    return verifier
