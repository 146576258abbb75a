"""The experts that computed a request's tokens, for trainers that replay the router.

The kernels of the target note what ``moe_gate`` chooses; committed rows are taken from that as
hidden states are, so the experts of rejected drafts are not among them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields, is_dataclass, replace
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sametoken.drafters.base import Drafter
from sametoken.drafters.extract import CommittedRows, ExtractDrafter
from sametoken.errors import InvariantError, UnsupportedError
from sametoken.extraction.writer import CommittedRowsOutput
from sametoken.models.decoder import Decoder
from sametoken.ops.backend import Kernels, Routing
from sametoken.types.outputs import StepResult
from sametoken.types.plan import StepPlan

#: As vLLM has it: more experts do not fit one byte.
_MAX_IN_A_BYTE = 256


class NotingKernels:
    """Kernels that note which experts are chosen.

    Attributes:
        plain: the kernels themselves.
        num_experts: of a layer, once there was a pass.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.plain = kernels
        self._chosen: list[Tensor] = []
        self.num_experts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def moe_gate(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels.moe_gate``."""
        chosen, weights = self.plain.moe_gate(logits, routing, bias)
        self._chosen.append(chosen)
        self.num_experts = logits.shape[1]
        return chosen, weights

    def take(self, num_rows: int, num_layers: int) -> Tensor:
        """[T, L * top_k]: the experts of the last pass, over T rows and L layers of experts.

        Earlier notes, as of a drafter that shares the kernels, are dropped.
        """
        noted: list[Tensor] = []
        while sum(map(len, noted)) < num_rows * num_layers:
            noted.append(self._chosen.pop())
        self._chosen.clear()
        # A layer of many rows runs in slices, in order.
        by_layer = torch.cat(noted[::-1]).view(num_layers, num_rows, -1)
        return by_layer.transpose(0, 1).flatten(1)


def plain_kernels(kernels: Kernels) -> Kernels:
    """The kernels themselves, without notes."""
    return kernels.plain if isinstance(kernels, NotingKernels) else kernels


class ExpertRecorder:
    """``Extraction`` that puts the experts of committed positions into the results of requests."""

    def __init__(self) -> None:
        self._noting: NotingKernels | None = None
        self._rows = CommittedRowsOutput()
        self._in_flight: deque[StepPlan] = deque()
        self._layers: tuple[int, ...] = ()
        self._num_layers = 0

    def wrap_kernels(self, kernels: Kernels) -> Kernels:
        """Kernels for the target, with notes."""
        self._noting = NotingKernels(kernels)
        return cast("Kernels", self._noting)

    def wrap(self, drafter: Drafter, target: Decoder) -> Drafter:
        """The drafter, with every step's committed rows recorded.

        Raises:
            UnsupportedError: the target has no experts.
        """
        self._layers = tuple(i for i, layer in enumerate(target.layers) if _routes(layer))
        self._num_layers = len(target.layers)
        if not self._layers:
            raise UnsupportedError(
                f"{target.config.architecture} has no experts to return",
                "leave enable_return_routed_experts out",
            )
        noting, count = self._noting, len(self._layers)
        assert noting is not None
        return ExtractDrafter(
            drafter, self._rows, lambda hidden: noting.take(len(hidden.last), count)
        )

    def launch(self, plan: StepPlan) -> None:
        """Expect the rows of a step.

        Raises:
            InvariantError: the prefix cache supplies positions, which no expert computes.
        """
        if any(one.num_cached for one in plan.admissions):
            raise InvariantError("a request takes positions from the prefix cache")
        self._in_flight.append(plan)

    def process_output(self, result: StepResult) -> StepResult:
        """The result of the oldest step, with its experts."""
        plan = self._in_flight.popleft()
        if not plan.requests:
            return result
        found = self._by_slot(self._rows.take(plan.step_id))
        pairs = zip(plan.requests, result.requests, strict=True)
        requests = [
            one if scheduled.replays else replace(one, routed_experts=found.get(scheduled.slot))
            for scheduled, one in pairs
        ]
        return StepResult(result.step_id, tuple(requests))

    def end(self, request_id: str, num_kept_tokens: int | None, *, aborted: bool) -> None:
        """A no-op."""

    def flush(self) -> None:
        """A no-op."""

    def close(self) -> None:
        """A no-op."""

    def _by_slot(self, rows: CommittedRows) -> dict[int, np.ndarray[Any, Any]]:
        """[rows, layers, top_k] by slot; 0 in layers without experts."""
        assert self._noting is not None
        dtype = np.uint8 if self._noting.num_experts <= _MAX_IN_A_BYTE else np.uint16
        chosen = rows.states.view(len(rows.states), len(self._layers), -1)
        whole = np.zeros((len(chosen), self._num_layers, chosen.shape[2]), dtype)
        whole[:, list(self._layers)] = chosen.numpy()
        found, first = {}, 0
        for slot, group in groupby(rows.slots.tolist()):
            last = first + len(list(group))
            found[slot] = whole[first:last]
            first = last
        return found


def _routes(node: object) -> bool:
    """Whether a layer, or a part of it, chooses experts."""
    if isinstance(node, Routing):
        return True
    return is_dataclass(node) and any(_routes(getattr(node, one.name)) for one in fields(node))
