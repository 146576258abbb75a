"""Decoder layers in one call of C (layer.c).

A call from Python takes 4 to 20 µs, with its checks and the memory of its result: the nine of a
layer took a quarter of a small model's step, and one for each of 30 layers a tenth.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from sametoken.ops.backend import AttentionRows, KeptRows, LayerKV
from sametoken.ops.layer import LayerParts, serves
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.native.library import NativeLibrary
from sametoken.ops.native.weights import PanelWeight, QuantizedWeight, is_bf16, require
from sametoken.ops.weight import Weight

#: As in layer.c.
_UNQUANTIZED, _QUANTIZED, _INTEGERS = range(3)


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("form", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("rounding", ctypes.c_int64),
        ("fixed", ctypes.c_float),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float), ("bf16", ctypes.c_int32))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _Norm) for name in ("after_attention", "following", "of_queries", "of_keys")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "sinks")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "half", "window")),
        ("bf16", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("keys", "values", "k_scales", "v_scales"))


class NativeLayers:
    """``WholeLayers`` in C.

    Not a dataclass: its tensors are those of its layers, and are not to be found twice.

    Args:
        library: of the kernels.
        parts: by layer; None where C has not all its products. Addresses are taken now, as on a
            CPU they stay, and those of keys and values in the first pass over them.
        dtype: of the activations.
    """

    __slots__ = ("_described", "_dtype", "_first", "_layers", "_memory", "_parts", "_run", "ends")

    def __init__(
        self, library: NativeLibrary, parts: Sequence[LayerParts | None], dtype: torch.dtype
    ) -> None:
        self._run, self._parts, self._dtype = library.decoder_layers, parts, dtype
        self._layers = (_Layer * len(parts))(
            *(_Layer() if one is None else _layer(one, dtype) for one in parts)
        )
        self._memory = (_Memory * len(parts))()
        self._first = next(index for index, one in enumerate(parts) if one is not None)
        # The first layer's keys of the memory that is described, as long as they live.
        self._described: Callable[[], Tensor | None] = lambda: None
        self.ends = _ends([one is not None for one in parts])

    @classmethod
    def of(cls, library: NativeLibrary, parts: Sequence[LayerParts | None]) -> NativeLayers | None:
        """The layers, if C has all products of any, which have one dtype."""
        dtypes = [None if one is None else _dtype_of(one) for one in parts]
        dtype = next((one for one in dtypes if one is not None), None)
        if dtype is None:
            return None
        own = [one if of_one is dtype else None for one, of_one in zip(parts, dtypes, strict=True)]
        return cls(library, own, dtype)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        layers: range,
        rows: AttentionRows,
        memory: Sequence[object],
        kept: KeptRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``WholeLayers``."""
        kv, table = memory[self._first], rows.block_table
        assert isinstance(kv, LayerKV)
        assert serves(len(x), kept)
        require(x, self._dtype)
        require(residual, self._dtype)
        require(table, torch.int64)
        if self._described() is not kv.keys:
            self._describe(x, memory)
            self._described = weakref.ref(kv.keys)
        done = self._run(
            ctypes.addressof(self._layers[layers.start]),
            ctypes.addressof(self._memory[layers.start]),
            len(layers),
            x.data_ptr(),
            residual.data_ptr(),
            rows.positions.data_ptr(),
            rows.slots.data_ptr(),
            rows.kv_slots.data_ptr(),
            table.data_ptr(),
            table.shape[1],
            kv.keys.shape[2],
            kv.keys.dtype is FLOAT8,
            x.shape[0],
            *_addresses(kept),
        )
        if not done:
            raise MemoryError(f"no memory for a layer of {x.shape[0]} rows")
        residual = residual if kept is None else residual[: len(kept.index)]
        # An input that is wider than the output lends it the beginning of its memory.
        return x.view(-1)[: residual.numel()].view(residual.shape), residual

    def _describe(self, x: Tensor, memory: Sequence[object]) -> None:
        """Take the addresses of the layers' keys and values."""
        for index, parts in enumerate(self._parts):
            if parts is not None:
                kv = memory[index]
                assert isinstance(kv, LayerKV)
                _, scales = stored_form(x, kv)
                self._memory[index] = _Memory(kv.keys.data_ptr(), kv.values.data_ptr(), *scales)


def _addresses(kept: KeptRows | None) -> tuple[int | None, int | None, int | None, int]:
    if kept is None:
        return None, None, None, -1
    given = (kept.index.data_ptr(), kept.positions.data_ptr(), kept.slots.data_ptr())
    return *given, len(kept.index)


def _ends(whole: Sequence[bool]) -> tuple[int, ...]:
    """``WholeLayers.ends`` of layers that are whole or not."""
    ends = [len(whole)]
    for index, is_whole in reversed([*enumerate(whole)]):
        ends.append(max(ends[-1], index + 1) if is_whole else index)
    return tuple(reversed(ends[1:]))


def _dtype_of(parts: LayerParts) -> torch.dtype | None:
    """The dtype of a layer's products; None if C has not all of them, or they have several."""
    weights = (parts.qkv[0], parts.output[0], parts.gate_up, parts.down)
    dtypes = {weight.dtype if _is_one_product(weight) else None for weight in weights}
    return dtypes.pop() if len(dtypes) == 1 else None


def _layer(parts: LayerParts, dtype: torch.dtype) -> _Layer:
    shape, rotary, qk_norm = parts.shape, parts.rotary, parts.qk_norm
    for table in (rotary.cos, rotary.sin, parts.sinks):
        if table is not None:
            require(table, torch.float32)
    return _Layer(
        qkv=_matrix(*parts.qkv),
        output=_matrix(*parts.output),
        gate_up=_matrix(parts.gate_up),
        down=_matrix(parts.down),
        after_attention=_norm(parts.norm.weight, parts.norm.eps, dtype),
        following=_norm(parts.following.weight, parts.following.eps, dtype),
        of_queries=_Norm() if qk_norm is None else _norm(qk_norm.q_weight, qk_norm.eps, dtype),
        of_keys=_Norm() if qk_norm is None else _norm(qk_norm.k_weight, qk_norm.eps, dtype),
        cos=rotary.cos.data_ptr(),
        sin=rotary.sin.data_ptr(),
        sinks=None if parts.sinks is None else parts.sinks.data_ptr(),
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        dim=shape.head_dim,
        half=rotary.cos.shape[1],
        window=shape.sliding_window or 0,
        bf16=dtype is torch.bfloat16,
        scale=shape.scale,
    )


def _is_one_product(weight: Weight) -> TypeGuard[PanelWeight | QuantizedWeight]:
    """Whether a product is one call of C, and no subclass's own."""
    if type(weight) is QuantizedWeight:
        return weight.order is None
    return type(weight) is PanelWeight


def _matrix(weight: Weight, bias: Tensor | None = None) -> _Matrix:
    assert _is_one_product(weight)
    matrix = _Matrix(packed=weight.panels.data_ptr(), n=weight.out_features, k=weight.in_features)
    matrix.bias = None if bias is None else bias.data_ptr()
    if isinstance(weight, QuantizedWeight):
        matrix.form = weight.form.data_ptr()
        matrix.kind = _QUANTIZED if weight.rounding else _INTEGERS
        if weight.rounding:
            matrix.rounding, matrix.fixed = weight.rounding
    return matrix


def _norm(weight: Tensor, eps: float, dtype: torch.dtype) -> _Norm:
    return _Norm(weight.data_ptr(), eps, norm_is_bf16(weight, dtype))


def norm_is_bf16(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a norm's weight, fp32 or of the activations' ``dtype``, is bf16."""
    require(weight, torch.float32 if weight.dtype is torch.float32 else dtype)
    return is_bf16(weight)


def stored_form(x: Tensor, kv: LayerKV) -> tuple[bool, tuple[int | None, ...]]:
    """Whether KV is float8 rather than of the dtype of ``x``, and the addresses of its scales."""
    e4m3 = kv.keys.dtype is FLOAT8
    require(x, x.dtype if e4m3 else kv.keys.dtype)
    scales = (kv.k_scales, kv.v_scales)
    for one in scales:
        if one is not None:
            require(one, torch.float32)
    return e4m3, tuple(None if one is None else one.data_ptr() for one in scales)
