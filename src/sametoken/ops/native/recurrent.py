"""A pass over recurrent state by the C kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.gated_delta_rule.rule import GatedDeltaParams
from sametoken.ops.model.mamba2.rule import Mamba2Params
from sametoken.ops.model.recurrent.layout import SlotRows
from sametoken.ops.model.recurrent.row_by_row import RowByRowPass
from sametoken.ops.model.recurrent.rule import Folded, LayerMemory, RawRows, RuleWeights
from sametoken.ops.native.library import NativeLibrary

# ``MAX_GATES`` of recurrent.h.
_MAX_GATES = 2


class _RawRows(ctypes.Structure):
    """``raw_rows`` of recurrent.h."""

    _fields_ = (
        ("history", ctypes.c_void_p),
        ("pending", ctypes.c_void_p),
        ("pending_gates", ctypes.c_void_p),
        ("mixed", ctypes.c_void_p),
        ("gates", ctypes.c_void_p * _MAX_GATES),
        ("mixed_stride", ctypes.c_int64),
        ("gate_strides", ctypes.c_int64 * _MAX_GATES),
        ("conv_weight", ctypes.c_void_p),
        ("conv_bias", ctypes.c_void_p),
        ("channels", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("num_gates", ctypes.c_int64),
        ("taps", ctypes.c_int64),
        ("max_pending", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class NativePass:
    """``RecurrentPass`` in C; rules without C kernels run row by row, the fast form in PyTorch.

    Attributes:
        table: ``part_table`` of the pass.
    """

    library: NativeLibrary
    table: Tensor
    row_by_row: RowByRowPass

    @classmethod
    def begin(cls, rows: AttentionRows, folded: Folded, library: NativeLibrary) -> NativePass:
        """See ``Kernels.begin_pass``."""
        row_by_row = RowByRowPass.begin(rows, folded)
        return cls(library, part_table(row_by_row.parts), row_by_row)

    def run(self, weights: RuleWeights, raw: RawRows, memory: LayerMemory) -> Tensor:
        """See ``RecurrentPass.run``."""
        if isinstance(weights, GatedDeltaParams):
            out = self._gated_delta(weights, raw, memory)
        elif isinstance(weights, Mamba2Params):
            out = self._mamba2(weights, raw, memory)
        else:
            return self.row_by_row.run(weights, raw, memory)
        self.row_by_row.run_fast(weights, raw, memory, out)
        return out

    def finish(self) -> None:
        """See ``RecurrentPass.finish``."""
        self.row_by_row.finish()

    def _gated_delta(self, params: GatedDeltaParams, raw: RawRows, memory: LayerMemory) -> Tensor:
        rule, gates = params.rule, (params.A_log, params.dt_bias)
        sizes = (rule.num_key_heads, rule.num_value_heads, rule.key_dim, rule.value_dim)
        return self._walk(self.library.gated_delta, params, gates, sizes, raw, memory)

    def _mamba2(self, params: Mamba2Params, raw: RawRows, memory: LayerMemory) -> Tensor:
        rule, gates = params.rule, (params.A_log, params.D, params.dt_bias)
        sizes = (rule.num_heads, rule.head_dim, rule.num_groups, rule.state_dim)
        given = (*sizes, *params.time_step_limit)
        return self._walk(self.library.mamba2, params, gates, given, raw, memory)

    def _walk(
        self,
        function: Callable[..., int],
        params: GatedDeltaParams | Mamba2Params,
        gates: tuple[Tensor, ...],
        given: tuple[float, ...],
        raw: RawRows,
        memory: LayerMemory,
    ) -> Tensor:
        """The walked rows by a rule's function in C, which is given sizes and limits last."""
        out, bias = _output(params, raw, memory), params.conv_bias
        # Copies must outlive the call.
        conv_weight, *gate_weights = (_float(weight) for weight in (params.conv_weight, *gates))
        conv_bias = None if bias is None else _float(bias)
        done = function(
            self.table.data_ptr(),
            len(self.row_by_row.walked),
            ctypes.byref(_described(raw, memory, conv_weight, conv_bias)),
            memory.states.data_ptr(),
            *(weight.data_ptr() for weight in gate_weights),
            out.data_ptr(),
            *given,
            out.dtype is torch.bfloat16,
        )
        if not done:
            raise MemoryError(f"no memory for {len(out)} rows of a recurrent layer")
        return out


def _float(weight: Tensor) -> Tensor:
    return weight.float().contiguous()


def _described(
    raw: RawRows, memory: LayerMemory, conv_weight: Tensor, conv_bias: Tensor | None
) -> _RawRows:
    """The struct of addresses and sizes."""
    mixed_stride, *gate_strides = raw.strides
    return _RawRows(
        memory.history.data_ptr(),
        memory.pending_mixed.data_ptr(),
        memory.pending_gates.data_ptr(),
        raw.mixed.data_ptr(),
        (ctypes.c_void_p * _MAX_GATES)(*(gate.data_ptr() for gate in raw.gates)),
        mixed_stride,
        (ctypes.c_int64 * _MAX_GATES)(*gate_strides),
        conv_weight.data_ptr(),
        None if conv_bias is None else conv_bias.data_ptr(),
        memory.history.shape[2],
        raw.gates[0].shape[1],
        len(raw.gates),
        memory.history.shape[1] + 1,
        memory.max_pending,
    )


def _output(params: GatedDeltaParams | Mamba2Params, raw: RawRows, memory: LayerMemory) -> Tensor:
    """Memory for the pass's rows; refuses what the kernels cannot read."""
    memory.require_dtype(raw)
    assert len(raw.gates) <= _MAX_GATES
    if raw.mixed.dtype not in (torch.bfloat16, torch.float32):
        raise InvariantError(f"raw rows in {raw.mixed.dtype}, not bf16 or fp32")
    if memory.states.dtype is not torch.float32:
        raise InvariantError(f"a kernel needs contiguous torch.float32, got {memory.states.dtype}")
    return torch.empty((raw.mixed.shape[0], params.rule.out_features), dtype=raw.mixed.dtype)


def part_table(parts: Sequence[SlotRows]) -> Tensor:
    """[P, 7] int64: parts of a pass in the order of their rows; ``slot_part`` of recurrent.h."""
    table, rows_before = [], 0
    for part in parts:
        counts = (part.first_row, part.num_rows, part.num_folded, part.num_lasting)
        table.append((part.slot, int(part.starts), *counts, rows_before))
        rows_before += part.num_folded + part.num_rows
    return torch.tensor(table, dtype=torch.int64).view(-1, 7)
