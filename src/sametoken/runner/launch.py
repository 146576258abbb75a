"""Launching the target's forward pass on inputs staged for this very step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sametoken.core.plan import StepPlan
from sametoken.models.base import CausalLM, HiddenStates
from sametoken.state.inputs import StepInputs
from sametoken.state.kv_cache import KVCache


class Launch(Protocol):
    """A forward pass whose inputs are loaded."""

    def run(self, model: CausalLM, kv: KVCache) -> HiddenStates:
        """Hidden states of the step's flat rows."""
        ...


class Launcher(Protocol):
    """Prepares launches."""

    def load(self, plan: StepPlan, x: StepInputs) -> Launch:
        """Take the inputs of a step.

        Raises:
            StaleInputsError: ``x`` was staged for another step than ``plan``.
        """
        ...


@dataclass(frozen=True, slots=True)
class EagerLaunch:
    """Runs the model directly on the loaded inputs."""

    x: StepInputs

    def run(self, model: CausalLM, kv: KVCache) -> HiddenStates:
        """Hidden states of the step's flat rows."""
        return model.forward(self.x.token_ids, self.x.rows, kv)


class EagerLauncher:
    """Launches without graphs: the CPU's way, and ``enforce_eager``'s."""

    def load(self, plan: StepPlan, x: StepInputs) -> EagerLaunch:
        """Take the inputs of a step; refuses those of another."""
        x.require_step(plan.step_id)
        return EagerLaunch(x)
