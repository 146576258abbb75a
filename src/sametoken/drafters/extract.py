"""Extraction of committed rows' hidden states, for training drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import (
    Drafter,
    DrafterAround,
    Drafts,
    LoadedDrafter,
    NoDrafter,
    Placement,
)
from sametoken.drafters.context import DraftContext
from sametoken.errors import ConfigError
from sametoken.models.base import CausalLM
from sametoken.types.speculative_methods import default_aux_layers


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """R committed rows of one step, grouped by slot; rows on the reserved slot are dead.

    Attributes:
        step_ids: [B] int64, the step id of its inputs.
        slots, positions: [R] int64.
        token_ids: [R] int64, the token at each position.
        next_token_ids: [R] int64, the committed token at the next position.
        states: [R, num_layers * hidden], the chosen layers concatenated, as in
            ``HiddenStates.auxiliary``.
    """

    step_ids: Tensor
    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    next_token_ids: Tensor
    states: Tensor


class RowSink(Protocol):
    """Receiver of committed rows."""

    def put(self, rows: CommittedRows) -> None:
        """Accept the rows of a step without waiting for the device."""
        ...


class ExtractDrafter(DrafterAround):
    """Passes a step's committed rows to a sink, then calls another drafter.

    The rows are the context's live rows, positions ``num_computed .. end - 1``; rejected
    drafts are not among them (tests/unit/drafters/test_extract.py).

    It runs in eager mode only: a captured step would copy to the same host memory every time.

    Args:
        inner: proposes drafts; ``NoDrafter`` for plain decoding.
        sink: receives the rows.
    """

    def __init__(self, inner: Drafter, sink: RowSink) -> None:
        super().__init__(inner)
        self._sink = sink

    def propose(self, context: DraftContext) -> Drafts:
        """The inner drafter's drafts."""
        live = context.catch_up()
        slots, positions = live.rows.slots, live.rows.positions
        self._sink.put(
            CommittedRows(
                step_ids=context.x.step_ids,
                slots=slots,
                positions=positions,
                token_ids=context.tokens_at(slots, positions),
                next_token_ids=context.tokens_at(slots, positions + 1),
                states=context.kernels.take_rows(context.hidden.auxiliary, live.source),
            )
        )
        return self._inner.propose(context)


def extracted_layers(spec: SpeculativeConfig, num_layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs are kept; ``num_layers`` is the final norm's input.

    Raises:
        ConfigError: a layer does not exist.
    """
    layers = spec.eagle_aux_hidden_state_layer_ids or default_aux_layers(num_layers)
    if not all(0 <= layer <= num_layers for layer in layers):
        raise ConfigError(
            f"states of layers {layers} cannot be kept: the model has {num_layers} layers",
            f"set eagle_aux_hidden_state_layer_ids to numbers from 0 to {num_layers}",
        )
    return layers


def load(spec: SpeculativeConfig, target: CausalLM, placement: Placement) -> LoadedDrafter:
    """See ``types.speculative_methods.Method``; what records is attached by ``extraction``."""
    return LoadedDrafter((), lambda kv_cache, coupling: NoDrafter())
