"""The experts that computed a request's tokens, for trainers that replay the router.

In a pass of the target ``moe_gate`` writes its choices to one buffer, in a replayed graph too.
After the step they are copied to the host; the result says how many of the rows are committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from sametoken.errors import InvariantError, UnsupportedError
from sametoken.models.base import CausalLM, StandIn
from sametoken.models.decoder import Decoder
from sametoken.ops.backend import AttentionRows, Kernels, Routing
from sametoken.ops.launch_sizes import ROW_MULTIPLE
from sametoken.ops.weight import Experts
from sametoken.state.upload import to_host
from sametoken.types.layout import StepLayout
from sametoken.types.plan import ScheduledRequest, StepPlan

#: As vLLM has it: ids of more experts do not fit one byte.
_MAX_IN_A_BYTE = 256


class RecordingKernels:
    """Kernels whose choices of experts fill a buffer while a pass is recorded.

    Attributes:
        plain: the kernels themselves.
    """

    def __init__(self, plain: Kernels) -> None:
        self.plain = plain
        self._layers: Sequence[Tensor] = ()
        self._num_filled = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    @contextmanager
    def recorded(self, layers: Sequence[Tensor]) -> Iterator[None]:
        """Within, ``moe_gate`` fills each layer's [T, top_k] int64, in the order of its calls.

        A layer of many rows may call it for slices of them, in order.

        Raises:
            InvariantError: not all of them were filled, or more.
        """
        self._layers, self._num_filled = layers, 0
        try:
            yield
        finally:
            self._layers = ()
        if self._num_filled != sum(map(len, layers)):
            raise InvariantError(
                f"experts of {self._num_filled} rows were chosen in a pass of {len(layers[0])} "
                f"rows and {len(layers)} layers with experts"
            )

    def moe_gate(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels.moe_gate``."""
        return self.plain.moe_gate(logits, routing, bias, self._next(logits.shape[0]))

    def _next(self, num_rows: int) -> Tensor | None:
        """[num_rows, top_k]: where the next choices belong; None if nothing is recorded."""
        if not self._layers:
            return None
        layer, first = divmod(self._num_filled, len(self._layers[0]))
        self._num_filled += num_rows
        if layer == len(self._layers) or first + num_rows > len(self._layers[0]):
            raise InvariantError(f"{num_rows} more rows choose experts than the pass has")
        return self._layers[layer][first : first + num_rows]


def recording(kernels: Kernels) -> Kernels:
    """Kernels for a target whose experts are to be recorded."""
    return cast("Kernels", RecordingKernels(kernels))


def plain_kernels(kernels: Kernels) -> Kernels:
    """The kernels themselves, which record nothing."""
    return kernels.plain if isinstance(kernels, RecordingKernels) else kernels


@dataclass(frozen=True, slots=True)
class StepExperts:
    """The experts of one step's rows, in host memory.

    Attributes:
        chosen: [T, layers, top_k]; undefined until the copy has landed.
        row_starts: the first row of each request; empty if nothing was recorded.
    """

    chosen: np.ndarray[Any, Any]
    row_starts: tuple[int, ...]

    def of(
        self, index: int, scheduled: ScheduledRequest, num_accepted: int
    ) -> np.ndarray[Any, Any] | None:
        """[rows, layers, top_k] of a request's committed rows; None if replayed or not recorded.

        A copy: a view would keep the whole step's rows alive, in pinned memory on a GPU.
        """
        if scheduled.replays or not self.row_starts:
            return None
        # Rejected drafts come last.
        first, num_rows = self.row_starts[index], scheduled.num_query + num_accepted
        return self.chosen[first : first + num_rows].copy()


#: Of a step that is not recorded.
NO_EXPERTS = StepExperts(np.empty(0), ())


class Recorder(Protocol):
    """Records the experts that the passes of an engine's targets choose, or none."""

    def over(self, target: CausalLM) -> CausalLM:
        """The target with its passes recorded."""
        ...

    def keep(self, plan: StepPlan, layout: StepLayout) -> StepExperts:
        """Enqueue the copy of the newest pass's experts to the host, before the next pass.

        Args:
            plan: the step's plan.
            layout: its rows, which come before those of padding.

        Raises:
            InvariantError: the prefix cache supplies positions, which no expert computes.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoRecorder:
    """Records nothing."""

    def over(self, target: CausalLM) -> CausalLM:
        """The target itself."""
        return target

    def keep(self, plan: StepPlan, layout: StepLayout) -> StepExperts:
        """``NO_EXPERTS``."""
        return NO_EXPERTS


NO_RECORDER: Recorder = NoRecorder()


class ExpertRecorder:
    """``Recorder`` of targets of one form, of which one pass runs at a time.

    Drafters that share the target's kernels run outside its passes and record nothing.

    Args:
        target: loaded with ``kernels``.
        kernels: of its layers.
        num_rows: the most rows of a step, padding included.
        device: where the target runs.

    Raises:
        UnsupportedError: the target has no experts.
    """

    def __init__(
        self, target: Decoder, kernels: RecordingKernels, num_rows: int, device: torch.device
    ) -> None:
        found = {i: one for i, layer in enumerate(target.layers) for one in mixtures_of(layer)}
        if not found:
            raise UnsupportedError(
                f"{target.config.architecture} has no experts to return",
                "leave enable_return_routed_experts out",
            )
        self._kernels, self._layers = kernels, tuple(found)
        ((top_k, num_experts),) = {(one.top_k, one.num_experts) for one in found.values()}
        in_a_byte = num_experts <= _MAX_IN_A_BYTE
        self._dtypes = (torch.uint8, np.uint8) if in_a_byte else (torch.int16, np.uint16)
        # Captured passes write to it; its address never changes. Layers without experts stay 0.
        shape = len(target.layers), num_rows, top_k
        self._chosen = torch.zeros(shape, dtype=torch.int64, device=device)

    def over(self, target: CausalLM) -> CausalLM:
        """See ``Recorder``."""
        return RecordedTarget(target, self)

    def recorded(self, num_rows: int) -> AbstractContextManager[None]:
        """A block with one pass of this many rows; errors as ``RecordingKernels.recorded``."""
        room = self._chosen.shape[1]
        if num_rows > room:
            raise InvariantError(f"a pass of {num_rows} rows where {room} may be recorded")
        return self._kernels.recorded([self._chosen[i, :num_rows] for i in self._layers])

    def keep(self, plan: StepPlan, layout: StepLayout) -> StepExperts:
        """See ``Recorder``."""
        if any(one.num_cached for one in plan.admissions):
            raise InvariantError("a request takes positions from the prefix cache")
        stored, dtype = self._dtypes
        rows = self._chosen[:, : layout.row_starts[-1]].transpose(0, 1)
        narrow = rows.to(stored, memory_format=torch.contiguous_format)
        return StepExperts(np.asarray(to_host(narrow)).view(dtype), layout.row_starts)


class RecordedTarget(StandIn):
    """A ``CausalLM`` in place of a target whose passes are recorded.

    Args:
        target: the model.
        recorder: what records them.
    """

    def __init__(self, target: CausalLM, recorder: ExpertRecorder) -> None:
        super().__init__(target)
        self._recorder = recorder

    def around(self, rows: AttentionRows) -> AbstractContextManager[None]:
        """See ``StandIn``."""
        return self._recorder.recorded(rows.slots.shape[0])


def recorder_of(target: Decoder, num_rows: int, device: torch.device) -> Recorder:
    """What records a target's experts, if it was loaded with ``recording`` kernels.

    Args:
        target: the model, or this rank's share.
        num_rows: the most rows of a step without padding.
        device: where it runs.

    Raises:
        UnsupportedError: the target has no experts.
    """
    kernels = target.kernels
    if not isinstance(kernels, RecordingKernels):
        return NO_RECORDER
    return ExpertRecorder(target, kernels, num_rows + ROW_MULTIPLE, device)


class Mixture(NamedTuple):
    """The experts of a layer: how many a row chooses, of how many, and all of them."""

    top_k: int
    num_experts: int
    experts: Experts

    @property
    def share(self) -> float:
        """The part of the experts that a row chooses."""
        return self.top_k / self.num_experts


def mixtures_of(node: object) -> Iterator[Mixture]:
    """The mixtures of experts in a layer."""
    if not is_dataclass(node):
        return
    parts = {one.name: getattr(node, one.name) for one in fields(node)}
    if "routing" in parts:
        num_experts = parts["router"].weight.out_features
        yield Mixture(parts["routing"].top_k, num_experts, parts["experts"])
    for part in parts.values():
        yield from mixtures_of(part)
