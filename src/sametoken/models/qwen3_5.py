"""Qwen3-Next and Qwen3.5: hybrids of Gated DeltaNet and gated attention, dense or MoE.

In order: config keys, layers with their tensor names, the shared decoder, the two classes, which
differ in how the projection into Gated DeltaNet is stored. Of a vision-language checkpoint only
the text decoder is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as short
from typing import Any, ClassVar

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.layers.attention import GatedAttention, GatedDeltaNet
from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import Block
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import (
    attention_cache,
    attention_heads,
    load_centred_head_norms,
    load_centred_norm,
)
from sametoken.models.decoder import Decoder
from sametoken.models.experts import divided_with_experts, is_sparse, load_dense_or_sparse
from sametoken.models.layer_types import FULL, LINEAR
from sametoken.models.load.settings import COMPARE, MAX_HEAD_DIM, Settings
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.backend import AttentionShape, RotaryTable
from sametoken.ops.cache_types import LayerCache, Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams


def _layer_types(config: ModelConfig, location: str) -> tuple[str, ...]:
    """The type of each layer, ``FULL`` or ``LINEAR``."""
    settings = Settings(config.extra, location)
    interval = settings.integer("full_attention_interval", 4)
    implied = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(config.num_layers)]
    types = settings.names("layer_types") or tuple(implied)
    if len(types) != config.num_layers:
        raise CheckpointError(
            f"{location}: layer_types={short(types)} does not name {config.num_layers} layers",
            COMPARE,
        )
    return types


def gated_delta_rule(config: ModelConfig, location: str) -> GatedDelta:
    """Sizes of the Gated DeltaNet layers (``linear_*`` keys).

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    settings = Settings(config.extra, location, "linear_")
    key_heads = settings.integer("num_key_heads")
    value_heads = settings.integer("num_value_heads")
    key_dim = settings.integer("key_head_dim", most=MAX_HEAD_DIM)
    value_dim = settings.integer("value_head_dim", most=MAX_HEAD_DIM)
    if value_heads % key_heads:
        raise CheckpointError(
            f"{location}: {value_heads} value heads over {key_heads} key heads are not possible",
            COMPARE,
        )
    kernel = settings.integer("conv_kernel_dim")
    return GatedDelta(key_heads, value_heads, key_dim, value_dim, kernel)


def load_gated_attention(
    config: ModelConfig, weights: WeightReader, prefix: str, rotary: RotaryTable
) -> GatedAttention:
    """Load the attention block at ``prefix``, with gate, q, k, v fused; ranks divide its heads."""
    heads = attention_heads(config, weights)
    whole, shape, _ = heads
    projection = weights.linear(
        config.hidden_size,
        Part(f"{prefix}.q_proj", 2 * whole.q_size, _gate_first(shape), Split.ROWS),
        heads.kv_part(f"{prefix}.k_proj"),
        heads.kv_part(f"{prefix}.v_proj"),
        bias=config.attention_bias,
    )
    output_part = Part(f"{prefix}.o_proj", config.hidden_size)
    output = weights.row_parallel(whole.q_size, output_part, bias=config.attention_bias)
    qk_norm = load_centred_head_norms(config, weights, prefix)
    return GatedAttention(weights.kernels, shape, projection, output, rotary, qk_norm)


def _gate_first(shape: AttentionShape) -> Tensor:
    """Permutation of q_proj's rows: from [q | gate] per head to [gate | q] of all heads."""
    row = torch.arange(2 * shape.q_size).view(shape.num_heads, 2, shape.head_dim)
    permutation = torch.empty_like(row)
    q, gate = row.view(2, shape.num_heads, shape.head_dim).flip(0)
    permutation[:, 0], permutation[:, 1] = q, gate
    return permutation.flatten()


def _load_params(rule: GatedDelta, weights: WeightReader, prefix: str) -> GatedDeltaParams:
    """Load the convolution, and the gates in fp32; ranks divide them with their heads."""
    heads, channels, rows = rule.num_value_heads, rule.conv_channels, Split.ROWS
    conv = Part(f"{prefix}.conv1d.weight", channels, split=rows, output_sizes=rule.qkv_sizes)

    def by_head(name: str) -> Tensor:
        return weights.tensor(Part(f"{prefix}.{name}", heads, split=rows), dtype=torch.float32)

    return GatedDeltaParams(
        rule.divided(weights.parallel.size),
        A_log=by_head("A_log"),
        dt_bias=by_head("dt_bias"),
        conv_weight=weights.tensor(conv, (1, rule.conv_kernel)).squeeze(1).t().contiguous(),
        conv_bias=None,
    )


class HybridDecoder(Decoder, ABC):
    """The shared decoder with Gated DeltaNet in the layers of type ``LINEAR``.

    Norm weights are stored as their difference from 1. Tensors of a multi-token-prediction
    module are not read.
    """

    layer_types: ClassVar[frozenset[str]] = frozenset((FULL, LINEAR))
    #: The second as transformers 5.4 to 5.5.3 saves an encoder of images (transformers#45357).
    unused_prefixes: ClassVar[tuple[str, ...]] = ("mtp.", "model.language_model.visual.")
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    rotates_parts = True
    #: Some tools repeat a part, and transformers 5.4 and 5.5 has it thrice (transformers#45216).
    text_prefixes = (
        "model.language_model.language_model",
        "model.language_model.language_model.language_model",
        *Decoder.text_prefixes,
    )

    load_layer_mlp = staticmethod(load_dense_or_sparse)

    @abstractmethod
    def _load_projection(self, weights: WeightReader, prefix: str, rule: GatedDelta) -> Linear:
        """The fused projection to [q | k | v | z | b | a]; ``rule`` has the sizes of all ranks."""
        ...

    @staticmethod
    def divided_sizes(config: ModelConfig) -> dict[str, int]:
        """As ``Decoder.divided_sizes``; value heads are divided with their key heads."""
        settings = Settings(config.extra, config.architecture)
        keys = ("moe_intermediate_size", "shared_expert_intermediate_size")
        sizes = divided_with_experts(config, is_sparse, keys)
        if LINEAR in _layer_types(config, settings.location):
            sizes["linear_num_key_heads"] = settings.integer("linear_num_key_heads")
        return sizes

    @classmethod
    def caches_of(
        cls, config: ModelConfig, dtype: torch.dtype, location: str
    ) -> tuple[LayerCache, ...]:
        """As ``Decoder.caches_of``."""
        attention = attention_cache(config, dtype)
        recurrent = Recurrent(gated_delta_rule(config, location), dtype)
        types = _layer_types(config, location)
        return tuple(recurrent if kind == LINEAR else attention for kind in types)

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        prefix, cache = f"{self._prefix}.layers.{index}", self._declared[index]
        if isinstance(cache, Recurrent):
            assert isinstance(cache.rule, GatedDelta)
            return self._load_gated_delta_net(weights, f"{prefix}.linear_attn", cache.rule)
        return load_gated_attention(self.config, weights, f"{prefix}.self_attn", rotary)

    def _load_norm(self, weights: WeightReader, name: str) -> RMSNorm:
        return load_centred_norm(self.config, weights, name)

    def _load_gated_delta_net(
        self, weights: WeightReader, prefix: str, rule: GatedDelta
    ) -> GatedDeltaNet:
        hidden = self.config.hidden_size
        return GatedDeltaNet(
            kernels=self.kernels,
            projection=self._load_projection(weights, prefix, rule),
            params=_load_params(rule, weights, prefix),
            norm_weight=weights.vector(f"{prefix}.norm.weight", rule.value_dim),
            eps=self.config.rms_norm_eps,
            output=weights.row_parallel(rule.out_features, Part(f"{prefix}.out_proj", hidden)),
        )


class Qwen3_5MoeForCausalLM(HybridDecoder):
    """Tensors ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and ``in_proj_a``."""

    #: All layers have experts, whose weights are normalised.
    ignored = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")

    def _load_projection(self, weights: WeightReader, prefix: str, rule: GatedDelta) -> Linear:
        gates = (
            Part(f"{prefix}.in_proj_{one}", rule.num_value_heads, split=Split.ROWS) for one in "ba"
        )
        return weights.linear(self.config.hidden_size, *_parts_of_qkvz(rule, prefix), *gates)


class Qwen3_5ForCausalLM(Qwen3_5MoeForCausalLM):
    """The same tensors, and more KV heads where a config omits their number."""

    implied: ClassVar[Mapping[str, Any]] = {**HybridDecoder.implied, "num_key_value_heads": 4}


class Qwen3NextForCausalLM(HybridDecoder):
    """Tensors ``in_proj_qkvz`` and ``in_proj_ba``, with rows interleaved by key head.

    GGUF files have the first as Qwen3.5's checkpoints have it; adapters know it by its own name.
    """

    def _load_projection(self, weights: WeightReader, prefix: str, rule: GatedDelta) -> Linear:
        hidden, size = self.config.hidden_size, weights.parallel.size
        groups, ratio = rule.num_key_heads // size, rule.num_value_heads // rule.num_key_heads
        values = ratio * rule.value_dim
        qkvz = _regrouped(groups, (rule.key_dim, rule.key_dim, values, values))
        ba = _regrouped(groups, (ratio, ratio))
        gates = Part(f"{prefix}.in_proj_ba", size * len(ba), ba, Split.ROWS)
        whole = Part(f"{prefix}.in_proj_qkvz", size * len(qkvz), qkvz, Split.ROWS)
        if f"{prefix}.in_proj_qkv.weight" in weights:
            stored = weights.linear(hidden, *_parts_of_qkvz(rule, prefix), gates)
            return replace(stored, parts=(whole, gates))
        return weights.linear(hidden, whole, gates)


def _parts_of_qkvz(rule: GatedDelta, prefix: str) -> tuple[Part, ...]:
    """q, k and v as one part, and z."""
    rows, qkv = Split.ROWS, f"{prefix}.in_proj_qkv"
    return (
        Part(qkv, rule.conv_channels, split=rows, output_sizes=rule.qkv_sizes),
        Part(f"{prefix}.in_proj_z", rule.out_features, split=rows),
    )


def _regrouped(num_groups: int, sizes: tuple[int, ...]) -> Tensor:
    """Permutation of rows: from parts of ``sizes`` in each group to each part of all groups."""
    groups = torch.arange(num_groups * sum(sizes)).view(num_groups, sum(sizes))
    stored = torch.cat([part.flatten() for part in groups.split(sizes, dim=1)])
    return stored.argsort()
