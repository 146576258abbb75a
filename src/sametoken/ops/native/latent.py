"""Latent attention by the C kernels: thin wrappers that pass tensors' addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.errors import InvariantError, UnsupportedError
from sametoken.ops.backend import AttentionRows, QueryRows
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.model.latent_attention.shape import LatentRotary, LatentShape, LayerLatent
from sametoken.ops.native.library import NativeLibrary, WeightMemory
from sametoken.ops.native.weights import is_bf16, require

MAX_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class PanelHeadWeights:
    """``HeadWeights``, each head's matrix packed as a ``PanelWeight``, one after the other.

    Attributes:
        panels: uint8, the only copy.
        shape: heads, N and K.
    """

    library: NativeLibrary
    panels: Tensor
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the one copy."""
        return self.panels.numel()

    def heads(self, first: int, last: int) -> PanelHeadWeights:
        """See ``HeadWeights.heads``."""
        heads, n, k = self.shape
        size = len(self.panels) // heads
        panels = self.panels[first * size : last * size]
        return PanelHeadWeights(self.library, panels, (last - first, n, k), self.dtype)

    def transposed(self) -> PanelHeadWeights:
        """See ``HeadWeights.transposed``: packed anew, from products with the identity."""
        heads, n, k = self.shape
        identity = torch.eye(k, dtype=self.dtype)[:, None].expand(-1, heads, -1)
        rows = torch.empty(k, heads, n, dtype=self.dtype)
        self.matmul(identity, rows)
        return _packed(self.library, rows.transpose(0, 1), _bytes)

    def matmul(self, x: Tensor, out: Tensor) -> None:
        """See ``HeadWeights.matmul``."""
        if x.dim() == 4:
            for rows, written in zip(x, out, strict=True):
                self.matmul(rows, written)
            return
        heads, n, k = self.shape
        if x.shape[1:] != (heads, k) or out.shape != (x.shape[0], heads, n):
            raise InvariantError(f"{list(x.shape)} times {self.shape} is not {list(out.shape)}")
        _require_rows(self.dtype, x, out)
        self.library.head_products(
            x.data_ptr(),
            self.panels.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            heads,
            n,
            k,
            *x.stride()[:2],
            *out.stride()[:2],
            is_bf16(x),
        )


class LatentOperations:
    """Those of latent attention in ``NativeKernels``."""

    _library: NativeLibrary
    _memory: WeightMemory

    def pack_heads(self, weight: Tensor) -> PanelHeadWeights:
        """See ``Kernels.pack_heads``."""
        return _packed(self._library, weight, self._memory.take)

    def require_latent(self, shape: LatentShape) -> None:
        """See ``Kernels.require_latent``."""
        if shape.rank % 8 or shape.rope_dim % 8 or shape.width > MAX_WIDTH:
            raise UnsupportedError(
                f"latents of {shape.rank} + {shape.rope_dim} elements are not multiples of 8 up to "
                f"{MAX_WIDTH} together",
                "set SAMETOKEN_KERNELS=reference, which is slower",
            )

    def latent_rope_and_cache(
        self,
        q: Tensor,
        latent: Tensor,
        rotary: LatentRotary,
        rows: AttentionRows,
        memory: LayerLatent,
        out: Tensor,
    ) -> None:
        """See ``Kernels.latent_rope_and_cache``."""
        t, heads, rope_dim = q.shape
        e4m3, vector_scale = _stored_form(memory, q, latent, out)
        if rotary.weight.dtype not in (torch.float32, q.dtype) or not rotary.weight.is_contiguous():
            raise InvariantError(f"a norm of {rotary.weight.dtype} over latents of {q.dtype}")
        self._library.latent_rope_and_cache(
            q.data_ptr(),
            latent.data_ptr(),
            memory.vectors.data_ptr(),
            out.data_ptr(),
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            rows.positions.data_ptr(),
            rows.kv_slots.data_ptr(),
            rotary.weight.data_ptr(),
            vector_scale,
            rotary.eps,
            t,
            heads,
            memory.rank,
            rope_dim // 2,
            *q.stride()[:2],
            latent.stride(0),
            *out.stride()[:2],
            e4m3,
            is_bf16(q),
            is_bf16(rotary.weight),
            rotary.interleaved,
        )

    def latent_attention(
        self, q: Tensor, scale: float, rows: QueryRows, memory: LayerLatent
    ) -> Tensor:
        """See ``Kernels.latent_attention``."""
        t, heads, width = q.shape
        table, vectors = rows.block_table, memory.vectors
        e4m3, vector_scale = _stored_form(memory, q)
        if not (q.is_contiguous() and vectors.is_contiguous() and table.is_contiguous()):
            raise InvariantError(
                "latent attention needs contiguous queries, memory and block table"
            )
        out = torch.empty((t, heads, memory.rank), dtype=q.dtype)
        done = self._library.attention(
            q.data_ptr(),
            vectors.data_ptr(),
            vectors.data_ptr(),
            None,
            vector_scale,
            vector_scale,
            out.data_ptr(),
            rows.positions.data_ptr(),
            rows.slots.data_ptr(),
            table.data_ptr(),
            t,
            heads,
            1,
            width,
            memory.rank,
            vectors.shape[1],
            table.shape[1],
            0,
            e4m3,
            scale,
            is_bf16(q),
        )
        if not done:
            raise MemoryError(f"no memory for the attention of {t} rows")
        return out


def _packed(
    library: NativeLibrary, weight: Tensor, take: Callable[[int], Tensor]
) -> PanelHeadWeights:
    """[H, N, K] packed in the bytes that ``take`` gives."""
    heads, n, k = weight.shape
    bf16 = is_bf16(weight)
    size = library.packed_bytes(n, k, bf16)
    panels = take(heads * size)
    for head, matrix in enumerate(weight.contiguous()):
        library.pack(matrix.data_ptr(), panels[head * size :].data_ptr(), n, k, bf16)
    return PanelHeadWeights(library, panels, (heads, n, k), weight.dtype)


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _stored_form(memory: LayerLatent, *rows: Tensor) -> tuple[bool, int | None]:
    """Whether vectors are float8, not of the dtype of ``rows``, and the address of their scale."""
    e4m3, scale = memory.vectors.dtype is FLOAT8, memory.scale
    _require_rows(rows[0].dtype if e4m3 else memory.vectors.dtype, *rows)
    if scale is None:
        return e4m3, None
    require(scale, torch.float32)
    return e4m3, scale.data_ptr()


def _require_rows(dtype: torch.dtype, *tensors: Tensor) -> None:
    """Refuse another dtype, and rows whose elements are not adjacent: C code reads raw memory."""
    for tensor in tensors:
        if tensor.dtype is not dtype or (tensor.numel() and tensor.stride(-1) != 1):
            raise InvariantError(f"a kernel needs rows of {dtype}, got {tensor.dtype}")
