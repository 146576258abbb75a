"""The raw logits of every emitted token, from eager steps and out of replayed graphs alike."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_files import OPTIONS

from helpers.harness import run
from helpers.recorded import watched
from sametoken.config import EngineConfig
from sametoken.distributed.ranks import LeadingRunner
from sametoken.engine.build import build_engine
from sametoken.engine.build_gpu import MOST_ROWS
from sametoken.engine.core import EngineCore
from sametoken.runner.runner import EagerLauncher

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


class Tap:
    """Copies the logits of each step between its halves, before anything is done to them."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._copies = []

    def runner(self, runner):
        """The runner, tapped; of several ranks the first one's."""
        if isinstance(runner, LeadingRunner):
            return dataclasses.replace(runner, inner=self.runner(runner.inner))
        tap, processing = self, watched(runner.processing, self._admit)

        class Tapped(type(processing)):
            def of_step(self, layout, buffer):
                return _TappedProcessor(super().of_step(layout, buffer), tap)

        values = {one.name: getattr(processing, one.name) for one in dataclasses.fields(processing)}
        return dataclasses.replace(runner, processing=Tapped(**values))

    def _admit(self, admission) -> None:
        self._prompts[admission.slot] = admission.prompt_token_ids

    def copy(self, output) -> None:
        at = output.x.sampled
        copies = (one.clone() for one in (output.logits, at.slots, at.positions))
        self._copies.append((dict(self._prompts), *copies))

    def rows(self) -> Rows:
        found = {}
        # Steps run in order: a position's last copy is from the step that emitted it.
        for prompts, logits, slots, positions in self._copies:
            for row, where in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
                if where[0] in prompts:
                    found[prompts[where[0]], where[1] + 1] = logits[row]
        return found


@dataclasses.dataclass
class _TappedProcessor:
    inner: object
    tap: Tap

    def start_masks(self) -> None:
        self.inner.start_masks()

    def process(self, output) -> None:
        self.tap.copy(output)
        self.inner.process(output)

    def gather_logprobs(self, tokens) -> None:
        self.inner.gather_logprobs(tokens)


def record(items, **options) -> Recording:
    """Answer requests of different prompts."""
    assert len({item.prompt_token_ids for item in items}) == len(items)
    core, tap = build_engine(EngineConfig.from_options(**options)), Tap()
    core._runner = tap.runner(core._runner)
    found = drive(core, items)
    found.rows = tap.rows()
    return found


def answer(path, items, **options) -> Recording:
    """Answer requests in an engine of ``OPTIONS``, changed by others."""
    config = EngineConfig.from_options(model=str(path), **OPTIONS | options)
    return drive(build_engine(config), list(items))


def drive(core: EngineCore, items) -> Recording:
    """Run requests to their lengths."""
    ran = run(core, items, MAX_STEPS)
    return Recording(ran.tokens, {}, ran.offered, ran.accepted)


def require_same_logits(items, found: Recording, truth: Recording) -> None:
    """Of every emitted token, to the bit."""
    assert found.tokens == truth.tokens
    for item in items:
        prompt = item.prompt_token_ids
        for key in ((prompt, at) for at in range(len(prompt), item.max_total_tokens)):
            assert torch.equal(found.rows[key], truth.rows[key]), (item.request_id, key[1])


def windows_must_be_captured(patch: pytest.MonkeyPatch) -> None:
    """A step of windows alone that runs without a graph fails."""
    run_eagerly = EagerLauncher.run

    def run(self, layout, *rest):
        shape = layout.shape
        assert not shape.all_sampled or shape.num_rows > MOST_ROWS, shape
        run_eagerly(self, layout, *rest)

    patch.setattr(EagerLauncher, "run", run)
