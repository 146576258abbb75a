"""OLMo 2: norms after attention and MLP, none in front, and norms of q and k over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sametoken.layers.attention import Attention, wanted_queries
from sametoken.layers.norm import RMSNorm
from sametoken.layers.parallel import TensorParallel, gather_columns
from sametoken.layers.residual import Block, Matrices, NoNorm, NormedAfter
from sametoken.models.blocks import load_mlp, load_norm
from sametoken.models.decoder import Decoder, DecoderLayer
from sametoken.models.load.weights import WeightReader
from sametoken.ops.backend import AttentionRows, KeptRows, LayerKV, RotaryTable


@dataclass(frozen=True, slots=True)
class WideNormAttention(Matrices):
    """``Attention`` with a norm of q and one of k over all heads of all ranks, before RoPE.

    A rank gathers the others' heads, norms all of them, and keeps its own.
    """

    attention: Attention
    parallel: TensorParallel
    q_norm: RMSNorm
    k_norm: RMSNorm

    def __call__(
        self, x: Tensor, rows: AttentionRows, kv: LayerKV, kept: KeptRows | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; ``kept`` is as in ``Attention``."""
        own = self.attention
        shape, kernels = own.shape, own.kernels
        q, k, v = own.qkv(x).split((shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
        qkv = torch.cat((self._normed(q, self.q_norm), self._normed(k, self.k_norm), v), dim=-1)
        q = kernels.rope_and_cache(qkv, shape, own.rotary, rows, kv, None)
        q, wanted = wanted_queries(kernels, q, rows, kept)
        return own.output(kernels.attention(q, shape, wanted, kv))

    def _normed(self, part: Tensor, norm: RMSNorm) -> Tensor:
        """This rank's columns of the norm over all ranks' columns."""
        width = part.shape[1]
        whole = norm(gather_columns(self.parallel, part))
        first = self.parallel.rank * width
        return whole[:, first : first + width]


class Olmo2ForCausalLM(Decoder):
    """The shared decoder with norms in other places."""

    implied: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> DecoderLayer:
        prefix = f"{self._prefix}.layers.{index}"
        attention = self._load_attention(weights, index, rotary)
        after_attention = self._load_norm(weights, f"{prefix}.post_attention_layernorm")
        mlp = load_mlp(self.config, weights, f"{prefix}.mlp")
        after_mlp = self._load_norm(weights, f"{prefix}.post_feedforward_layernorm")
        return DecoderLayer(
            NoNorm(),
            NormedAfter(attention, after_attention),
            NoNorm(),
            NormedAfter(mlp, after_mlp),
        )

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention = self._self_attention(weights, index, rotary)
        config, prefix = self.config, f"{self._prefix}.layers.{index}.self_attn"
        q_norm, k_norm = (
            load_norm(config, weights, f"{prefix}.{name}_norm", num_heads * config.head_dim)
            for name, num_heads in (("q", config.num_heads), ("k", config.num_kv_heads))
        )
        return WideNormAttention(attention, weights.parallel, q_norm, k_norm)
