"""What hybrids of Gated DeltaNet and gated attention share (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from reprlib import repr as short
from typing import ClassVar

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.kernels.cache_types import LayerCache, Recurrent
from sametoken.kernels.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.kernels.interface import AttentionRows, AttentionShape, QKNorm, RotaryTable
from sametoken.layers.gated_attention import GatedAttention
from sametoken.layers.gated_delta_net import GatedDeltaNet
from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.decoder import (
    Block,
    Decoder,
    DecoderLayer,
    attention_cache,
    attention_shapes,
    load_mlp,
)
from sametoken.models.experts import load_sparse_moe
from sametoken.models.settings import MAX_HEAD_DIM, Settings
from sametoken.models.weights import Part, Split, WeightReader
from sametoken.state.caches import ModelCache

FULL, LINEAR = "full_attention", "linear_attention"
TEXT_PREFIX = "model.language_model"


class HybridDecoder(Decoder, ABC):
    """A decoder in whose ``layer_types`` some layers are Gated DeltaNet.

    Norm weights are stored as their difference from 1. Tensors of a multi-token-prediction
    head and of a vision tower are left unread. Architectures say how the projection into a
    Gated DeltaNet block is stored.
    """

    layer_types: ClassVar[frozenset[str]] = frozenset((FULL, LINEAR))
    unused_prefixes: ClassVar[tuple[str, ...]] = ("mtp.", "model.visual.")

    @staticmethod
    def tensor_prefix(weights: WeightReader) -> str:
        """The decoder's own, or what it is called inside a model that also sees."""
        nested = f"{TEXT_PREFIX}.embed_tokens.weight" in weights
        return TEXT_PREFIX if nested else Decoder.tensor_prefix(weights)

    @staticmethod
    @abstractmethod
    def load_projection(
        rule: GatedDelta, weights: WeightReader, prefix: str, in_features: int
    ) -> Linear:
        """The fused projection to [q | k | v | z | b | a] of the block at ``prefix``.

        Args:
            rule: head counts of all ranks together, which divide them.
            weights: where tensors come from.
            prefix: what the block's tensor names begin with.
            in_features: width of the block's input.
        """
        ...

    @staticmethod
    def divided_sizes(config: ModelConfig) -> dict[str, int]:
        """As ``Decoder.divided_sizes``; value heads go with their key head."""
        sizes = Decoder.divided_sizes(config)
        dense_size = sizes.pop("intermediate_size")
        settings = Settings(config.extra, config.architecture)
        if LINEAR in _mixers(config, settings.location):
            sizes["linear_num_key_heads"] = settings.integer("linear_num_key_heads")
        sparse = [_is_sparse(config, index) for index in range(config.num_layers)]
        if not all(sparse):
            sizes["intermediate_size"] = dense_size
        if any(sparse):
            for key in ("moe_intermediate_size", "shared_expert_intermediate_size"):
                sizes[key] = settings.integer(key)
        return sizes

    @classmethod
    def caches_of(
        cls, config: ModelConfig, dtype: torch.dtype, location: str
    ) -> tuple[LayerCache, ...]:
        """As ``Decoder.caches_of``."""
        attention = attention_cache(config, dtype)
        recurrent = Recurrent(gated_delta_rule(config, location), dtype)
        kinds = _mixers(config, location)
        return tuple(recurrent if kind == LINEAR else attention for kind in kinds)

    def forward(self, token_ids: Tensor, rows: AttentionRows, cache: ModelCache) -> HiddenStates:
        """[T] ids to hidden states; advances the rows' slots and writes their KV."""
        step = self.kernels.begin_pass(rows, cache.folded) if cache.folded else None

        def mix(index: int, x: Tensor) -> Tensor:
            is_recurrent = isinstance(self.caches[index], Recurrent)
            how = step if is_recurrent else rows
            return self._layers[index].attention(x, how, cache.layers[index])

        hidden = self._run_layers(token_ids, mix)
        if step is not None:
            step.finish()
        return hidden

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> DecoderLayer:
        prefix, cache = f"{self._prefix}.layers.{index}", self._declared[index]
        mixer: Block
        if isinstance(cache, Recurrent):
            assert isinstance(cache.rule, GatedDelta)
            mixer = self._load_gated_delta_net(weights, f"{prefix}.linear_attn", cache.rule)
        else:
            mixer = load_gated_attention(self.config, weights, f"{prefix}.self_attn", rotary)
        return DecoderLayer(
            self._load_norm(weights, f"{prefix}.input_layernorm"),
            mixer,
            self._load_norm(weights, f"{prefix}.post_attention_layernorm"),
            load_layer_mlp(self.config, weights, f"{prefix}.mlp", index),
        )

    def _load_norm(self, weights: WeightReader, name: str) -> RMSNorm:
        return load_norm(self.config, weights, name)

    def _load_gated_delta_net(
        self, weights: WeightReader, prefix: str, rule: GatedDelta
    ) -> GatedDeltaNet:
        hidden = self.config.hidden_size
        return GatedDeltaNet(
            kernels=self.kernels,
            projection=self.load_projection(rule, weights, prefix, hidden),
            params=_load_params(rule, weights, prefix),
            norm_weight=weights.vector(f"{prefix}.norm.weight", rule.value_dim),
            eps=self.config.rms_norm_eps,
            output=weights.row_parallel(rule.out_features, Part(f"{prefix}.out_proj", hidden)),
        )


def _load_params(rule: GatedDelta, weights: WeightReader, prefix: str) -> GatedDeltaParams:
    """Weights of the convolution, and of the gates in fp32; ranks divide them with their heads."""
    heads, channels, rows = rule.num_value_heads, rule.conv_channels, Split.ROWS
    conv = Part(f"{prefix}.conv1d.weight", channels, split=rows, runs=rule.qkv_sizes)

    def by_head(name: str) -> Tensor:
        return weights.tensor(Part(f"{prefix}.{name}", heads, split=rows), dtype=torch.float32)

    return GatedDeltaParams(
        rule.divided(weights.parallel.size),
        A_log=by_head("A_log"),
        dt_bias=by_head("dt_bias"),
        conv_weight=weights.tensor(conv, (1, rule.conv_kernel)).squeeze(1).t().contiguous(),
        conv_bias=None,
    )


def load_norm(config: ModelConfig, weights: WeightReader, name: str) -> RMSNorm:
    """The norm ``name`` over the hidden size."""
    weight = _zero_centred(weights, f"{name}.weight", config.hidden_size)
    return RMSNorm(weights.kernels, weight, config.rms_norm_eps)


def load_gated_attention(
    config: ModelConfig, weights: WeightReader, prefix: str, rotary: RotaryTable
) -> GatedAttention:
    """The attention block at ``prefix``, with gate, q, k and v fused; ranks divide its heads."""
    whole, shape = attention_shapes(config, weights)
    projection = weights.linear(
        config.hidden_size,
        Part(f"{prefix}.q_proj", 2 * whole.q_size, _gate_first(shape), Split.ROWS),
        Part(f"{prefix}.k_proj", whole.kv_size, split=Split.ROWS),
        Part(f"{prefix}.v_proj", whole.kv_size, split=Split.ROWS),
        bias=config.attention_bias,
    )
    output_part = Part(f"{prefix}.o_proj", config.hidden_size)
    output = weights.row_parallel(whole.q_size, output_part, bias=config.attention_bias)
    qk_norm = QKNorm(
        _zero_centred(weights, f"{prefix}.q_norm.weight", config.head_dim),
        _zero_centred(weights, f"{prefix}.k_norm.weight", config.head_dim),
        config.rms_norm_eps,
    )
    return GatedAttention(weights.kernels, shape, projection, output, rotary, qk_norm)


def load_layer_mlp(config: ModelConfig, weights: WeightReader, prefix: str, index: int) -> Block:
    """The MLP at ``prefix`` as the layer of that index has it: dense, or a mixture of experts."""
    load: Callable[[ModelConfig, WeightReader, str], Block]
    load = load_sparse_moe if _is_sparse(config, index) else load_mlp
    return load(config, weights, prefix)


def gated_delta_rule(config: ModelConfig, location: str) -> GatedDelta:
    """Sizes of the config's Gated DeltaNet layers.

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
            "compare with the original checkpoint's",
        )
    kernel = settings.integer("conv_kernel_dim")
    return GatedDelta(key_heads, value_heads, key_dim, value_dim, kernel)


def _mixers(config: ModelConfig, location: str) -> tuple[str, ...]:
    """Every layer's kind, ``FULL`` or ``LINEAR``."""
    settings = Settings(config.extra, location)
    interval = settings.integer("full_attention_interval", 4)
    implied = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(config.num_layers)]
    types = settings.names("layer_types") or tuple(implied)
    if len(types) != config.num_layers:
        raise CheckpointError(
            f"{location}: layer_types={short(types)} does not name {config.num_layers} layers",
            "compare with the original checkpoint's",
        )
    return types


def _is_sparse(config: ModelConfig, index: int) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
    settings = Settings(config.extra, config.architecture)
    step = settings.integer("decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise CheckpointError(f"{settings.location}: mlp_only_layers is no list")
    return bool(settings.get("num_experts")) and index not in dense and (index + 1) % step == 0


def _zero_centred(weights: WeightReader, name: str, size: int) -> Tensor:
    """A norm's weight, in fp32: 1 + w rounds in 16 bits."""
    return 1.0 + weights.vector(name, size).float()


def _gate_first(shape: AttentionShape) -> Tensor:
    """Where the rows of q_proj go: from [q | gate] of each head to [gate | q] of all heads."""
    row = torch.arange(2 * shape.q_size).view(shape.num_heads, 2, shape.head_dim)
    places = torch.empty_like(row)
    q, gate = row.view(2, shape.num_heads, shape.head_dim).flip(0)
    places[:, 0], places[:, 1] = q, gate
    return places.flatten()
