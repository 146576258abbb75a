"""Slots of recurrent layers that all declare the same, and passes over them."""

from __future__ import annotations

from dataclasses import replace

import torch

from sametoken.ops.backend import AttentionRows
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.mamba2.rule import Mamba2Params
from sametoken.ops.model.recurrent.layout import slot_rows
from sametoken.ops.model.recurrent.row_by_row import RowByRowPass
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.state.caches import ModelCache


class Slots:
    """Memory of ``num_layers`` layers; what nobody has written is NaN, since it must not matter.

    ``state_stride``: by default the engine's, which has another without drafts.

    Attributes:
        states, history, pending_mixed, pending_gates: as in ``LayerMemory``, over all layers.
    """

    def __init__(
        self,
        declared: Recurrent,
        num_drafts: int,
        *,
        num_slots: int = 3,
        num_layers: int = 1,
        begin_pass=RowByRowPass.begin,
        device: torch.device | str = "cpu",
        state_stride: int | None = None,
    ) -> None:
        room = num_drafts + (state_stride or 1) - 1
        self.cache = ModelCache.allocate(
            (declared,) * num_layers,
            num_blocks=0,
            block_size=1,
            max_num_seqs=num_slots,
            num_drafts=room,
            device=torch.device(device),
        )
        self.declared, self.rule, self.begin_pass = declared, declared.rule, begin_pass
        self.states, self.history, self.pending_mixed, self.pending_gates = self.cache.slots
        self.folded = self.cache.folded
        if state_stride is not None:
            self.folded = replace(self.folded, state_stride=state_stride)
        self.position, self.num_pending = self.folded.position, self.folded.num_pending
        for held in self.cache.slots:
            held.fill_(float("nan"))

    def begin(self, rows: AttentionRows):
        return self.begin_pass(rows, self.folded)

    def layer(self, index: int) -> LayerMemory:
        return self.cache.layers[index]

    def run(self, running, layer: int, weights, mixed, *gates) -> torch.Tensor:
        return running.run(weights, RawRows(mixed, gates), self.layer(layer))


def params_of(
    declared: Recurrent, *, layer=0, bias=True, limit=(0.0, float("inf")), device="cpu"
) -> GatedDeltaParams | Mamba2Params:
    """Random parameters of a layer."""
    rule = declared.rule
    generator = torch.Generator().manual_seed(rule.conv_channels + layer)

    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight = random(rule.conv_kernel, rule.conv_channels, dtype=declared.dtype)
    shift = random(rule.conv_channels, dtype=declared.dtype) if bias else None
    if isinstance(rule, GatedDelta):
        return GatedDeltaParams(rule, *random(2, rule.num_value_heads), weight, shift)
    return Mamba2Params(rule, *random(3, rule.num_heads), weight, shift, limit)


def begin_as_on_a_gpu(rows: AttentionRows, folded) -> RowByRowPass:
    """The reference of kernels that store states at multiples of a stride."""
    return RowByRowPass(folded, slot_rows(rows, folded, folded.state_stride))


def poison(cache: ModelCache) -> ModelCache:
    """Everything that a model keeps is NaN; slots' counts stay at zero."""
    for held in (*cache.blocks, *cache.slots):
        held.fill_(float("nan"))
    return cache
