"""Attention whose norms of q and k are not those of each head before RoPE."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.layers.attention import Attention, wanted_queries
from sametoken.layers.norm import RMSNorm
from sametoken.layers.parallel import TensorParallel, gather_columns, own_columns
from sametoken.layers.residual import Matrices
from sametoken.ops.backend import AttentionRows, KeptRows, LayerKV, RotaryTable
from sametoken.ops.model.attention.kv import KVScales


@dataclass(frozen=True, slots=True)
class WideNormAttention(Matrices):
    """``Attention`` with a norm of q and one of k over all heads of all ranks, before RoPE.

    A rank gathers the others' heads, norms all of them, and keeps its own.

    Attributes:
        ranks_per_kv_head: adjacent ranks that have the same KV heads.
    """

    attention: Attention
    parallel: TensorParallel
    q_norm: RMSNorm
    k_norm: RMSNorm
    ranks_per_kv_head: int = 1

    def __call__(
        self, x: Tensor, rows: AttentionRows, kv: LayerKV, kept: KeptRows | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; ``kept`` is as in ``Attention``."""
        own = self.attention
        shape, kernels = own.shape, own.kernels
        q, k, v = own.qkv(x).split((shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm, self.ranks_per_kv_head)
        qkv = torch.cat((q, k, v), dim=-1)
        q = kernels.rope_and_cache(qkv, shape, own.rotary, rows, kv, None)
        q, wanted = wanted_queries(kernels, q, rows, kept)
        return own.output(kernels.attention(q, shape, wanted, kv))

    def _normed(self, part: Tensor, norm: RMSNorm, ranks_per_share: int = 1) -> Tensor:
        """This rank's columns of the norm over all ranks' columns, each once."""
        whole = norm(gather_columns(self.parallel, part, ranks_per_share=ranks_per_share))
        return own_columns(self.parallel, whole, ranks_per_share)


@dataclass(frozen=True, slots=True)
class NormAfterRotation(Matrices):
    """``Attention`` with the norm of every head of q and k after RoPE.

    Attributes:
        still: the table of heads that are not rotated.
    """

    attention: Attention
    still: RotaryTable

    def __call__(
        self, x: Tensor, rows: AttentionRows, kv: LayerKV, kept: KeptRows | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; ``kept`` is as in ``Attention``."""
        own = self.attention
        shape, kernels = own.shape, own.kernels
        qk, v = own.qkv(x).split((shape.q_size + shape.kv_size, shape.kv_size), dim=-1)
        # Rotated as queries of a layer without KV of its own, which writes nothing.
        heads = replace(shape, num_heads=shape.num_heads + shape.num_kv_heads, num_kv_heads=0)
        qk = kernels.rope_and_cache(qk, heads, own.rotary, rows, _without_heads(kv), None)
        qkv = torch.cat((qk.flatten(1), v), dim=-1)
        q = kernels.rope_and_cache(qkv, shape, self.still, rows, kv, own.qk_norm)
        q, wanted = wanted_queries(kernels, q, rows, kept)
        return own.output(kernels.attention(q, shape, wanted, kv))


def _without_heads(kv: LayerKV) -> LayerKV:
    scales = None if kv.scales is None else KVScales(kv.scales.k[:0], kv.scales.v[:0])
    return replace(kv, keys=kv.keys[:, :0], values=kv.values[:, :0], scales=scales)
