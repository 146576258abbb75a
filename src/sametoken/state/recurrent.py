"""Recurrent state of one model's Gated DeltaNet layers: folded by position, never undone.

A slot keeps one state per layer, good for positions below ``position[slot]``, and the raw
inputs of the rows from there on (pending). A pass whose first row of the slot stands at p0
first runs the pending rows below p0: those are the drafts that were accepted, since p0 is
what is computed. Rejected drafts lie at p0 and above and are never run again
(docs/decisions/0009-fold-by-position.md; tests/unit/state/test_recurrent.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.kernels.causal_conv1d.reference import convolve_row
from sametoken.kernels.gated_delta_rule.layout import SlotRows, slot_rows
from sametoken.kernels.gated_delta_rule.operands import LayerMemory, RawRows
from sametoken.kernels.gated_delta_rule.reference import advance, gates
from sametoken.kernels.interface import AttentionRows, Kernels
from sametoken.kernels.native.bundle import NativeKernels, part_table


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """What a model's Gated DeltaNet layers need per slot.

    Attributes:
        num_layers: layers with recurrent state.
        conv_kernel: K, positions that the short convolution sees, its own included.
        conv_channels: C, width of [q | k | v] before the convolution.
        dtype: in which raw inputs are kept; must hold the model's activations exactly.
    """

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    conv_channels: int
    dtype: torch.dtype = torch.float32

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of q, k and v, which are ``conv_channels`` together."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    def divided(self, size: int) -> RecurrentSpec:
        """What each of ``size`` ranks needs: value heads go with their key head."""
        return replace(
            self,
            num_key_heads=self.num_key_heads // size,
            num_value_heads=self.num_value_heads // size,
            conv_channels=self.conv_channels // size,
        )

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of the folded states and of the convolutions' history, over all layers."""
        state = 4 * self.num_value_heads * self.key_dim * self.value_dim
        history = self.dtype.itemsize * (self.conv_kernel - 1) * self.conv_channels
        return self.num_layers * (state + history)

    def pending_bytes_per_slot(self, num_drafts: int) -> int:
        """Bytes of the raw inputs of ``num_drafts`` rows, over all layers."""
        row = self.dtype.itemsize * (self.conv_channels + 2 * self.num_value_heads)
        return self.num_layers * num_drafts * row

    def bytes_per_slot(self, num_drafts: int) -> int:
        """Bytes of one slot with room for ``num_drafts`` pending rows."""
        return self.state_bytes_per_slot + self.pending_bytes_per_slot(num_drafts)


@dataclass(frozen=True, slots=True)
class GatedDeltaParams:
    """One layer's weights between its projections.

    Attributes:
        A_log, dt_bias: [Hv].
        conv_weight: [K, C]: a checkpoint's [C, 1, K], by taps.
        conv_bias: [C] or None.
    """

    A_log: Tensor
    dt_bias: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None


class RecurrentPass(Protocol):
    """One forward pass over a cache: ``run`` once for every layer, then ``finish``."""

    def run(
        self, layer: int, mixed_qkv: Tensor, a: Tensor, b: Tensor, params: GatedDeltaParams
    ) -> Tensor:
        """Convolution and gated delta rule of the pass's rows: [T, Hv * Dv].

        Sums run in fp32 and round once, to the dtype of ``mixed_qkv``.

        Args:
            layer: index among the layers with recurrent state.
            mixed_qkv: [T, C], raw projections before the convolution; rows may lie apart.
            a, b: [T, Hv], raw gates; rows may lie apart.
            params: the layer's weights.

        Raises:
            InvariantError: the cache cannot hold these inputs exactly.
        """
        ...

    def finish(self) -> None:
        """Settle how far each slot is folded, once all layers have run."""
        ...


@dataclass(frozen=True, slots=True)
class RecurrentCache:
    """Recurrent state of S = max_num_seqs + 1 slots over L layers, k pending rows each.

    Attributes:
        spec: the sizes.
        states: [L, S, Hv, Dk, Dv] fp32, all positions below ``position`` folded in.
        history: [L, S, K - 1, C], raw inputs of the convolution at the last of them.
        pending_qkv: [L, S, k, C], raw inputs at ``position`` and above.
        pending_gates: [L, S, k, 2 * Hv], raw [a | b] of the same rows.
        position: [S] int64, positions folded.
        num_pending: [S] int64, rows that pending holds.
        open_pass: begins a pass over rows: by kernels in C or on a GPU, or row by row in PyTorch.
    """

    spec: RecurrentSpec
    states: Tensor
    history: Tensor
    pending_qkv: Tensor
    pending_gates: Tensor
    position: Tensor
    num_pending: Tensor
    open_pass: Callable[[RecurrentCache, AttentionRows], RecurrentPass]

    @classmethod
    def allocate(
        cls,
        spec: RecurrentSpec,
        *,
        max_num_seqs: int,
        num_drafts: int,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> RecurrentCache:
        """Room for ``max_num_seqs`` slots and the reserved one; slots start at position 0.

        Args:
            spec: the sizes.
            max_num_seqs: slots, without the reserved one.
            num_drafts: k, pending rows of a slot.
            device: where the memory is.
            kernels: the model's bundle; without one, a CPU runs row by row in PyTorch.
        """
        lead = (spec.num_layers, max_num_seqs + 1)

        def zeros(*shape: int, dtype: torch.dtype = spec.dtype) -> Tensor:
            return torch.zeros((*lead, *shape), dtype=dtype, device=device)

        counts = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        return cls(
            spec=spec,
            states=zeros(spec.num_value_heads, spec.key_dim, spec.value_dim, dtype=torch.float32),
            history=zeros(spec.conv_kernel - 1, spec.conv_channels),
            pending_qkv=zeros(num_drafts, spec.conv_channels),
            pending_gates=zeros(num_drafts, 2 * spec.num_value_heads),
            position=counts,
            num_pending=counts.clone(),
            open_pass=_select_pass(device, kernels),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        held = (self.states, self.history, self.pending_qkv, self.pending_gates)
        return sum(tensor.nbytes for tensor in held)

    def begin(self, rows: AttentionRows) -> RecurrentPass:
        """Find what a pass over ``rows`` folds, runs and leaves pending, from positions alone.

        Raises:
            InvariantError: a slot's rows do not follow on what is folded and pending; a GPU
                gives NaN for them instead.
        """
        return self.open_pass(self, rows)


def _select_pass(
    device: torch.device, kernels: Kernels | None
) -> Callable[[RecurrentCache, AttentionRows], RecurrentPass]:
    if device.type != "cuda":
        if isinstance(kernels, NativeKernels):
            return partial(NativePass.begin, kernels)
        return RowByRowPass.begin
    # Triton is part of CUDA builds of torch alone.
    from sametoken.state.recurrent_device import DevicePass

    return DevicePass.begin


def _parts_of(cache: RecurrentCache, rows: AttentionRows) -> tuple[SlotRows, ...]:
    return slot_rows(rows, cache.position, cache.num_pending, cache.pending_qkv.shape[2])


def _settle(cache: RecurrentCache, parts: tuple[SlotRows, ...]) -> None:
    """Write how far each slot is folded."""
    for part in parts:
        start = 0 if part.starts else cache.position[part.slot]
        cache.position[part.slot] = start + part.num_lasting
        cache.num_pending[part.slot] = part.num_pending


@dataclass(frozen=True, slots=True)
class NativePass:
    """``RecurrentPass`` by the C kernel, for CPUs.

    Attributes:
        table: ``part_table`` of the pass.
    """

    kernels: NativeKernels
    cache: RecurrentCache
    table: Tensor
    _parts: tuple[SlotRows, ...]

    @classmethod
    def begin(
        cls, kernels: NativeKernels, cache: RecurrentCache, rows: AttentionRows
    ) -> NativePass:
        """As ``RecurrentCache.begin``."""
        parts = _parts_of(cache, rows)
        return cls(kernels, cache, part_table(parts), parts)

    def run(
        self, layer: int, mixed_qkv: Tensor, a: Tensor, b: Tensor, params: GatedDeltaParams
    ) -> Tensor:
        """As ``RecurrentPass.run``."""
        cache, raw = self.cache, RawRows(mixed_qkv, a, b)
        if mixed_qkv.dtype != cache.spec.dtype:
            raise InvariantError(f"raw inputs in {mixed_qkv.dtype} are kept in {cache.spec.dtype}")
        memory = LayerMemory(
            cache.states[layer],
            cache.history[layer],
            cache.pending_qkv[layer],
            cache.pending_gates[layer],
        )
        return self.kernels.gated_delta(self.table, cache.spec, params, raw, memory)

    def finish(self) -> None:
        """As ``RecurrentPass.finish``."""
        _settle(self.cache, self._parts)


@dataclass(frozen=True, slots=True)
class RowByRowPass:
    """``RecurrentPass`` in plain PyTorch: the kernels' reference, and the path without them."""

    cache: RecurrentCache
    _parts: tuple[SlotRows, ...]

    @classmethod
    def begin(cls, cache: RecurrentCache, rows: AttentionRows) -> RowByRowPass:
        """As ``RecurrentCache.begin``."""
        return cls(cache, _parts_of(cache, rows))

    def run(
        self, layer: int, mixed_qkv: Tensor, a: Tensor, b: Tensor, params: GatedDeltaParams
    ) -> Tensor:
        """As ``RecurrentPass.run``."""
        spec = self.cache.spec
        if torch.promote_types(mixed_qkv.dtype, spec.dtype) != spec.dtype:
            raise InvariantError(f"raw inputs in {mixed_qkv.dtype} are kept in {spec.dtype}")
        rule = _RowRule.of(spec, params)
        raw_gates = torch.cat((a, b), dim=-1)
        width = spec.num_value_heads * spec.value_dim
        out = mixed_qkv.new_empty(mixed_qkv.shape[0], width)
        for part in self._parts:
            rows = slice(part.first_row, part.first_row + part.num_rows)
            out[rows] = self._run_slot(layer, part, mixed_qkv[rows], raw_gates[rows], rule)
        return out

    def finish(self) -> None:
        """As ``RecurrentPass.finish``."""
        _settle(self.cache, self._parts)

    def _run_slot(
        self, layer: int, part: SlotRows, qkv: Tensor, raw_gates: Tensor, rule: _RowRule
    ) -> Tensor:
        """The slot's pending rows, then its rows of the pass: [num_rows, Hv * Dv] fp32."""
        cache, here = self.cache, (layer, part.slot)
        state, history = cache.states[here], cache.history[here]
        if part.starts:
            state.zero_()
            history.zero_()
        folded, lasting = part.num_folded, part.num_lasting
        inputs = torch.cat((history, cache.pending_qkv[here][:folded], qkv))
        gate_inputs = torch.cat((cache.pending_gates[here][:folded], raw_gates))
        taps = history.shape[0]
        out = []
        for row in range(folded + part.num_rows):
            if row == lasting:
                state = state.clone()
            out.append(rule.run(state, inputs[row : row + taps + 1], gate_inputs[row]))
        history.copy_(inputs[lasting : lasting + taps])
        cache.pending_qkv[here][: part.num_pending] = inputs[taps + lasting :]
        cache.pending_gates[here][: part.num_pending] = gate_inputs[lasting:]
        return torch.stack(out[folded:])


@dataclass(frozen=True, slots=True)
class _RowRule:
    """The one row function of decode, verify, fold and prefill, with a layer's weights in fp32."""

    spec: RecurrentSpec
    decay_rate: Tensor
    dt_bias: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None

    @classmethod
    def of(cls, spec: RecurrentSpec, params: GatedDeltaParams) -> _RowRule:
        bias = params.conv_bias
        return cls(
            spec,
            params.A_log.float().exp(),
            params.dt_bias.float(),
            params.conv_weight.float(),
            None if bias is None else bias.float(),
        )

    def run(self, state: Tensor, window: Tensor, raw_gates: Tensor) -> Tensor:
        """Advance ``state`` by the row at the end of [K, C] ``window``: [Hv * Dv] fp32."""
        spec = self.spec
        keys = spec.num_key_heads * spec.key_dim
        mixed = convolve_row(window.float(), self.conv_weight, self.conv_bias)
        q, k, v = mixed.tensor_split((keys, 2 * keys))
        a, b = raw_gates.float().chunk(2)
        log_decay, beta = gates(a, b, self.decay_rate, self.dt_bias)
        q, k = q.view(-1, spec.key_dim), k.view(-1, spec.key_dim)
        v = v.view(-1, spec.value_dim)
        return advance(state, q, k, v, log_decay, beta).flatten()
