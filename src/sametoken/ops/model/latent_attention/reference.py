"""Latent attention in plain PyTorch: one row at a time, so every kind of row has the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from sametoken.ops.backend import AttentionRows, QueryRows
from sametoken.ops.model.attention.kv import as_stored
from sametoken.ops.model.gemm.reference import product
from sametoken.ops.model.latent_attention.shape import LatentRotary, LayerLatent
from sametoken.ops.model.norm_rope import rms_norm
from sametoken.ops.model.one_thread import one_thread


@dataclass(frozen=True, slots=True)
class PlainHeadWeights:
    """``HeadWeights`` as one tensor [H, N, K]."""

    matrices: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all heads."""
        return self.matrices.nbytes

    def heads(self, first: int, last: int) -> Self:
        """See ``HeadWeights.heads``."""
        return replace(self, matrices=self.matrices[first:last])

    def transposed(self) -> Self:
        """See ``HeadWeights.transposed``."""
        return replace(self, matrices=self.matrices.mT)

    def matmul(self, x: Tensor, out: Tensor) -> None:
        """See ``HeadWeights.matmul``."""
        for head, matrix in enumerate(self.matrices):
            rows = x[..., head, :].flatten(0, -2)
            out[..., head, :] = product(rows, matrix).view(out[..., head, :].shape)


def rope_and_cache(
    q: Tensor,
    latent: Tensor,
    rotary: LatentRotary,
    rows: AttentionRows,
    memory: LayerLatent,
    out: Tensor,
) -> None:
    """See ``Kernels.latent_rope_and_cache``."""
    cos, sin = rotary.cos[rows.positions], rotary.sin[rows.positions]
    rank, block_size = memory.rank, memory.vectors.shape[1]
    key = _rotated(latent[:, rank:], cos, sin, rotary.interleaved)
    normed = rms_norm(latent[:, :rank].float(), rotary.weight, rotary.eps)
    vector = as_stored(torch.cat((normed, key), dim=-1), memory.vectors.dtype, memory.scale)
    memory.vectors[rows.kv_slots // block_size, rows.kv_slots % block_size] = vector
    out.copy_(_rotated(q, cos[:, None], sin[:, None], rotary.interleaved))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of the last dimension, in fp32; they lie at j and j + half afterwards."""
    half = cos.shape[-1]
    x = x.float()
    low, high = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def attention(q: Tensor, scale: float, rows: QueryRows, memory: LayerLatent) -> Tensor:
    """See ``Kernels.latent_attention``."""
    out = q.new_empty(*q.shape[:2], memory.rank)
    block_size = memory.vectors.shape[1]
    stops = (rows.positions + 1).tolist()
    for row, (slot, stop) in enumerate(zip(rows.slots.tolist(), stops, strict=True)):
        blocks = rows.block_table[slot, : -(-stop // block_size)]
        vectors = memory.read(blocks, torch.float32).flatten(0, 1)[:stop]
        with one_thread():
            weights = torch.softmax(q[row].float().clone() @ vectors.T * scale, dim=-1)
            out[row] = (weights @ vectors[:, : memory.rank].contiguous()).to(q.dtype)
    return out
