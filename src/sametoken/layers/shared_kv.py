"""Attention that may read the KV of another layer, and norms its values (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.layers.attention import wanted_queries
from sametoken.layers.linear import Linear, Projection
from sametoken.layers.residual import Matrices
from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    KeptRows,
    Kernels,
    LayerKV,
    QKNorm,
    RotaryTable,
)


@dataclass(frozen=True, slots=True)
class NormedValueAttention(Matrices):
    """Attention whose values are normed too, by head and without a weight.

    Attributes:
        shape: head counts of this rank.
        written: the same with the KV heads that this layer writes, none if it reads another's.
        projection: to [q | k | v]; without v where values are made of keys; without both where the
            layer reads another's.
        ones: [head_dim], the weight of the values' norm.
    """

    kernels: Kernels
    shape: AttentionShape
    written: AttentionShape
    projection: Linear
    output: Projection
    rotary: RotaryTable
    qk_norm: QKNorm
    ones: Tensor

    def __call__(
        self,
        x: Tensor,
        rows: AttentionRows,
        kv: LayerKV,
        source: LayerKV,
        kept: KeptRows | None = None,
    ) -> Tensor:
        """As ``Attention``; writes ``kv``, and then reads ``source``."""
        kernels, written = self.kernels, self.written
        qkv = self._qkv(self.projection(x))
        q = kernels.rope_and_cache(qkv, written, self.rotary, rows, kv, self.qk_norm)
        q, wanted = wanted_queries(kernels, q, rows, kept)
        return self.output(kernels.attention(q, self.shape, wanted, source))

    def _qkv(self, projected: Tensor) -> Tensor:
        size = self.written.kv_size
        if not size:
            return projected
        # The last columns are v, or k if values are made of keys.
        heads = projected[:, -size:].contiguous().view(-1, self.shape.head_dim)
        values = self.kernels.rms_norm(heads, self.ones, self.qk_norm.eps)
        qk = projected[:, : self.written.q_size + size]
        return torch.cat((qk, values.view(-1, size)), dim=1)
