"""ERNIE 4.5, dense and with experts: Llama that rotates neighbouring elements of a head.

Rows of q and k are brought to the order of the shared decoder, which rotates halves. A module for
more tokens (``model.mtp_*``) is not read here but by ``models.heads.mtp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from reprlib import repr as short
from typing import Any, ClassVar

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.layers.attention import Attention
from sametoken.layers.residual import Block
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import attention_heads, load_mlp
from sametoken.models.decoder import Decoder
from sametoken.models.experts import (
    UNGROUPED,
    divided_with_experts,
    grouped_routing,
    load_grouped,
)
from sametoken.models.layer_types import REFUSED
from sametoken.models.load.settings import COMPARE, Settings, require_values
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.backend import RotaryTable
from sametoken.ops.cache_types import PagedKV


def _halves(num_heads: int, head_dim: int) -> Tensor:
    """Permutation of rows: even elements of a head before odd ones."""
    rows = torch.arange(num_heads * head_dim).view(num_heads, 2, head_dim // 2)
    return rows.transpose(1, 2).flatten()


def load_paired_attention(
    config: ModelConfig,
    weights: WeightReader,
    prefix: str,
    rotary: RotaryTable,
    cache: PagedKV | None = None,
) -> Attention:
    """As ``load_attention``, of heads whose rotated elements are neighbours."""
    hidden = config.hidden_size
    heads = attention_heads(config, weights, cache)
    whole, shape, _ = heads
    q_rows = _halves(shape.num_heads, shape.head_dim)
    k_rows = _halves(shape.num_kv_heads, shape.head_dim)
    qkv = weights.linear(
        hidden,
        Part(f"{prefix}.q_proj", whole.q_size, q_rows, Split.ROWS),
        heads.kv_part(f"{prefix}.k_proj", k_rows),
        heads.kv_part(f"{prefix}.v_proj"),
    )
    output = weights.row_parallel(whole.q_size, Part(f"{prefix}.o_proj", hidden))
    return Attention(weights.kernels, shape, qkv, output, rotary)


class Ernie4_5ForCausalLM(Decoder):
    """The shared decoder with another order of rows, and no biases."""

    refused = (*REFUSED, "use_bias")
    unused_prefixes = ("model.mtp_",)
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """No key.

        Raises:
            UnsupportedError: positions are compressed.
        """
        require_values(settings, {"compression_ratio": (1,)})
        return {}

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        prefix = f"{self._prefix}.layers.{index}.self_attn"
        return load_paired_attention(self.config, weights, prefix, rotary, self._cache_of(index))


#: Values that mean nothing else; others have no published checkpoint. ``moe_norm_min`` is the least
#: that weights are divided by, of which only rows of smaller sums would see anything.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "use_moe": (True,),
    "moe_gate": ("topk",),
    "moe_gate_act": ("softmax",),
    "moe_use_aux_free": (True,),
    "moe_norm_min": (1e-12,),
    "norm_topk_prob": (True,),
    "routed_scaling_factor": (1,),
}


def _is_sparse(config: ModelConfig, index: int) -> bool:
    settings = Settings(config.extra, config.architecture)
    first = _index(settings, "moe_layer_start_index", 1)
    last = _index(settings, "moe_layer_end_index", -1)
    step = settings.integer("moe_layer_interval", 1)
    return first <= index and (index <= last or last == -1) and (index + 1) % step == 0


def _index(settings: Settings, key: str, default: int) -> int:
    """That of a layer; -1 is the last one as an end, and the first one as a start."""
    index = settings.get(key, default)
    if not isinstance(index, int) or isinstance(index, bool) or index < -1:
        raise CheckpointError(f"{settings.location}: {key}={short(index)} is no layer", COMPARE)
    return index


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    """The same decoder with DeepSeek's mixture in most layers, behind a router of softmax."""

    divided_sizes = staticmethod(partial(divided_with_experts, is_sparse=_is_sparse))
    aliases: ClassVar[Mapping[str, str]] = {
        "moe_num_experts": "n_routed_experts",
        "num_experts": "n_routed_experts",
        "moe_num_shared_experts": "n_shared_experts",
        "moe_k": "num_experts_per_tok",
    }
    ignored = UNGROUPED
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """No key.

        Raises:
            UnsupportedError: another router, or positions are compressed.
        """
        require_values(settings, _ONLY)
        return super().renamed(settings)

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The MLP at ``prefix``, dense or of experts."""
        if not _is_sparse(config, index):
            return load_mlp(config, weights, prefix)
        routing = grouped_routing(Settings(config.extra, weights.source.location), "softmax")
        correction = "moe_statics.e_score_correction_bias"
        if f"{prefix}.gate.{correction}" in weights:
            # As a trainer may send it.
            correction = f"gate.{correction}"
        return load_grouped(config, weights, prefix, routing, correction)
