"""The native backend: thin wrappers that pass tensors' addresses to the C kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sametoken.errors import InvariantError, UnsupportedError
from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    LayerKV,
    QKNorm,
    QueryRows,
    RotaryTable,
    SampledRows,
)
from sametoken.ops.layer import LayerParts
from sametoken.ops.model.low_rank import AdaptedWeight, Room, RowAdapters, SeparateUpdates
from sametoken.ops.model.recurrent.rule import Folded
from sametoken.ops.native.latent import LatentOperations
from sametoken.ops.native.layer import NativeLayers, norm_is_bf16, stored_form
from sametoken.ops.native.library import NativeLibrary, WeightMemory, load_library
from sametoken.ops.native.recurrent import NativePass
from sametoken.ops.native.weights import (
    PanelWeight,
    QuantizedWeight,
    gated,
    is_bf16,
    pack_fp8,
    pack_int4,
    pack_integers,
    require,
)
from sametoken.ops.reference import ComposedKernels
from sametoken.ops.weight import Fp8Matrix, Int4Matrix, IntegerMatrix, Weight

MAX_HEAD_DIM = 1024
#: Of the memory of adapters: an adapter that stays keeps little of one that went.
FACTOR_SLAB_BYTES = 1 << 20


class NativeKernels(LatentOperations, ComposedKernels):
    """``Kernels`` in C for CPUs; contracts are those of the protocol.

    Raises:
        UnsupportedError: on construction, if the C kernels cannot be built; on use, for an
            unsupported dtype or head size.
    """

    name = "native"

    def __init__(self, library: NativeLibrary | None = None) -> None:
        self._library = library or load_library()
        self._memory = WeightMemory(self._library.prefer_large_pages)
        self._factors = WeightMemory(self._library.prefer_large_pages, FACTOR_SLAB_BYTES)

    def require(self, shape: AttentionShape) -> None:
        dim = shape.head_dim
        if dim % 8 or dim > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"head_dim {dim} is not a multiple of 8 up to {MAX_HEAD_DIM}",
                "set SAMETOKEN_KERNELS=reference, which is slower",
            )

    def pack(self, weight: Tensor) -> PanelWeight:
        return self._packed(weight, self._memory)

    def adapt(
        self, weight: Weight, sizes: Sequence[int], room: Room, rows: RowAdapters
    ) -> AdaptedWeight:
        updates = SeparateUpdates.of(partial(self._packed, memory=self._factors), sizes, room)
        return AdaptedWeight(weight, updates, rows, self.silu_mul)

    def _packed(self, weight: Tensor, memory: WeightMemory) -> PanelWeight:
        n, k = weight.shape
        bf16 = is_bf16(weight)
        weight = weight.contiguous()
        panels = memory.take(self._library.packed_bytes(n, k, bf16))
        self._library.pack(weight.data_ptr(), panels.data_ptr(), n, k, bf16)
        return PanelWeight(self._library, panels, panels.data_ptr(), n, k, weight.dtype)

    def pack_fp8(self, matrix: Fp8Matrix, dtype: torch.dtype) -> QuantizedWeight:
        return pack_fp8(self._library, self._memory, matrix, dtype)

    def pack_int4(self, matrix: Int4Matrix, dtype: torch.dtype) -> QuantizedWeight:
        return pack_int4(self._library, self._memory, matrix, dtype)

    def pack_integers(self, matrix: IntegerMatrix, dtype: torch.dtype) -> QuantizedWeight:
        return pack_integers(self._library, self._memory, matrix, dtype)

    def whole_layers(self, parts: Sequence[LayerParts | None]) -> NativeLayers | None:
        return NativeLayers.of(self._library, parts)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normed(x.contiguous(), None, weight, eps)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        by_head = (-1, weight.shape[0])
        gate = gate.reshape(by_head).contiguous()
        require(gate, x.dtype)
        return self._normed(x.view(by_head), gate, weight, eps).view(x.shape)

    def gated_group_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float
    ) -> Tensor:
        gate = gate.contiguous()
        require(x, x.dtype)
        require(gate, x.dtype)
        out = torch.empty_like(x)
        self._library.gated_group_norm(
            x.data_ptr(),
            gate.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            num_groups,
            x.shape[1] // num_groups,
            eps,
            is_bf16(x),
            norm_is_bf16(weight, x.dtype),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return gated(self._library.silu_mul, gate_up)

    def relu_squared(self, x: Tensor) -> Tensor:
        require(x, x.dtype)
        out = torch.empty_like(x)
        self._library.relu_squared(x.data_ptr(), out.data_ptr(), x.numel(), is_bf16(x))
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        t, h = x.shape
        require(x, x.dtype)
        require(residual, x.dtype)
        self._library.add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            t,
            h,
            eps,
            is_bf16(x),
            norm_is_bf16(weight, x.dtype),
        )
        return x, residual

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        gate = gate.contiguous()
        require(x, x.dtype)
        require(gate, x.dtype)
        out = torch.empty_like(x)
        self._library.sigmoid_mul(
            x.data_ptr(), gate.data_ptr(), out.data_ptr(), *x.shape, is_bf16(x)
        )
        return out

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return gated(self._library.gelu_mul, gate_up)

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        return gated(self._library.clamped_swiglu, gate_up, alpha, limit)

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        require(logits, torch.float32)
        out = torch.empty_like(logits)
        self._library.soft_cap(logits.data_ptr(), out.data_ptr(), *logits.shape, cap)
        return out

    def rope_and_cache(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        rotary: RotaryTable,
        rows: AttentionRows,
        kv: LayerKV,
        qk_norm: QKNorm | None,
    ) -> Tensor:
        t, dim = qkv.shape[0], shape.head_dim
        qkv = qkv.contiguous()
        self.require(shape)
        e4m3, scales = stored_form(qkv, kv)
        require(rotary.cos, torch.float32)
        require(rotary.sin, torch.float32)
        q = torch.empty((t, shape.num_heads, dim), dtype=qkv.dtype)
        self._library.rope_and_cache(
            qkv.data_ptr(),
            q.data_ptr(),
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            rows.positions.data_ptr(),
            rows.kv_slots.data_ptr(),
            None if qk_norm is None else qk_norm.q_weight.data_ptr(),
            None if qk_norm is None else qk_norm.k_weight.data_ptr(),
            *scales,
            0.0 if qk_norm is None else qk_norm.eps,
            t,
            shape.num_heads,
            shape.num_kv_heads,
            dim,
            rotary.cos.shape[1],
            kv.keys.shape[2],
            e4m3,
            is_bf16(qkv),
            qk_norm is not None and norm_is_bf16(qk_norm.q_weight, qkv.dtype),
        )
        return q

    def attention(
        self,
        q: Tensor,
        shape: AttentionShape,
        rows: QueryRows,
        kv: LayerKV,
        sinks: Tensor | None = None,
    ) -> Tensor:
        t, table = q.shape[0], rows.block_table
        e4m3, scales = stored_form(q, kv)
        require(table, torch.int64)
        if sinks is not None:
            require(sinks, torch.float32)
        out = torch.empty((t, shape.q_size), dtype=q.dtype)
        done = self._library.attention(
            q.data_ptr(),
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            *scales,
            out.data_ptr(),
            rows.positions.data_ptr(),
            rows.slots.data_ptr(),
            table.data_ptr(),
            t,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.head_dim,
            kv.keys.shape[2],
            table.shape[1],
            shape.sliding_window or 0,
            e4m3,
            shape.scale,
            is_bf16(q),
        )
        if not done:
            raise MemoryError(f"no memory for the attention of {t} rows")
        return out

    def token_keys(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, rows: SampledRows
    ) -> Tensor:
        parameters = (temperature, seeds, rows.slots)
        return self._chosen(logits, parameters, rows.positions, None, as_keys=True)[:, None]

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        token_ids: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        parameters = (temperature, seeds, slots)
        return self._chosen(logits, parameters, positions, token_ids, as_keys=False)

    def begin_pass(self, rows: AttentionRows, folded: Folded) -> NativePass:
        return NativePass.begin(rows, folded, self._library)

    def _chosen(
        self,
        logits: Tensor,
        parameters: tuple[Tensor, Tensor, Tensor | None],
        positions: Tensor,
        token_ids: Tensor | None,
        *,
        as_keys: bool,
    ) -> Tensor:
        """[L] int64: tokens of ``positions``, or the keys of tokens one position later.

        ``parameters`` are temperatures and seeds, by row or, with the rows' slots, by slot.
        """
        temperature, seeds, slots = parameters
        count, num_columns = logits.shape
        require(logits, torch.float32)
        require(temperature, torch.float32)
        for numbers in (seeds, slots, positions, token_ids):
            if numbers is not None:
                require(numbers, torch.int64)
        if token_ids is not None and token_ids.shape != (num_columns,):
            raise InvariantError(f"{num_columns} columns, token ids {list(token_ids.shape)}")
        out = torch.empty(count, dtype=torch.int64)
        done = self._library.sample(
            logits.data_ptr(),
            temperature.data_ptr(),
            seeds.data_ptr(),
            None if slots is None else slots.data_ptr(),
            positions.data_ptr(),
            None if token_ids is None else token_ids.data_ptr(),
            out.data_ptr(),
            count,
            num_columns,
            as_keys,
            as_keys,
        )
        if not done:
            raise MemoryError(f"no memory to sample {count} rows")
        return out

    def _normed(self, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        t, h = x.shape
        require(x, x.dtype)
        out = torch.empty_like(x)
        self._library.rms_norm(
            x.data_ptr(),
            None if gate is None else gate.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            t,
            h,
            eps,
            is_bf16(x),
            norm_is_bf16(weight, x.dtype),
        )
        return out
