"""Loading the blocks that families share: attention over keys and values, the gated MLP, norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.layers.attention import (
    Attention,
    GatedAttention,
    GatedDeltaNet,
    PositionScaledAttention,
)
from sametoken.layers.feed_forward import GatedMLP
from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm, RoundingNorm
from sametoken.layers.normed_attention import WideNormAttention
from sametoken.layers.residual import Block, BlockNorm, DecoderLayer, Layer
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import ModelConfig
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.backend import AttentionShape, QKNorm, RotaryTable
from sametoken.ops.cache_types import PagedKV
from sametoken.ops.layer import LayerParts
from sametoken.ops.weight import RoundingWeight, Weight


def rotary_of(config: ModelConfig, max_positions: int, device: torch.device) -> RotaryTable:
    """``rotary_table`` of the config's ``rope`` and heads."""
    head_dim = config.head_dim
    return rotary_table(config.rope, head_dim=head_dim, max_positions=max_positions, device=device)


class GatedNames(NamedTuple):
    """Names of the projections of a gated MLP."""

    gate: str
    up: str
    down: str


GATED = GatedNames("gate_proj", "up_proj", "down_proj")


class Biases(NamedTuple):
    """Whether the projections of an attention block have biases."""

    qkv: bool
    output: bool


def load_attention(
    config: ModelConfig,
    weights: WeightReader,
    prefix: str,
    rotary: RotaryTable,
    qk_norm: QKNorm | None = None,
    *,
    in_features: int | None = None,
    cache: PagedKV | None = None,
    biases: Biases | None = None,
) -> Attention:
    """Load the attention block at ``prefix``, with q, k and v fused; ranks divide its heads.

    By default ``in_features`` are the hidden size, ``cache``, the layer's declaration, is
    ``attention_cache``, and all projections have biases or none, as ``attention_bias`` says.
    """
    biases = biases or Biases(config.attention_bias, config.attention_bias)
    heads = attention_heads(config, weights, cache)
    qkv = weights.linear(
        config.hidden_size if in_features is None else in_features,
        Part(f"{prefix}.q_proj", heads.whole.q_size, split=Split.ROWS),
        heads.kv_part(f"{prefix}.k_proj"),
        heads.kv_part(f"{prefix}.v_proj"),
        bias=biases.qkv,
    )
    output_part = Part(f"{prefix}.o_proj", config.hidden_size)
    output = weights.row_parallel(heads.whole.q_size, output_part, bias=biases.output)
    return Attention(weights.kernels, heads.own, qkv, output, rotary, qk_norm)


def with_wide_norms(
    attention: Attention, config: ModelConfig, weights: WeightReader, prefix: str
) -> WideNormAttention:
    """The attention block at ``prefix`` with its norms of q and k over all heads."""
    q_norm = load_norm(config, weights, f"{prefix}.q_norm", config.num_heads * config.head_dim)
    k_norm = load_norm(config, weights, f"{prefix}.k_norm", config.num_kv_heads * config.head_dim)
    ranks = attention_cache(config, weights.dtype).ranks_per_head(weights.parallel.size)
    return WideNormAttention(attention, weights.parallel, q_norm, k_norm, ranks)


def layer_parts(layer: Layer, following: BlockNorm) -> LayerParts | None:
    """A layer as a backend may run it in one call; None: it has other blocks."""
    if type(layer) is not DecoderLayer:
        return None
    attention, norm, mlp = layer.attention, layer.post_attention_norm, layer.mlp
    if not (isinstance(attention, Attention) and isinstance(mlp, GatedMLP)):
        return None
    qkv, output, down = attention.qkv, attention.output, mlp.down
    if not (isinstance(output, Linear) and isinstance(down, Linear)):
        return None
    if not (isinstance(norm, RMSNorm) and isinstance(following, RMSNorm)):
        return None
    return LayerParts(
        attention.shape,
        attention.rotary,
        attention.qk_norm,
        attention.sinks,
        (qkv.weight, qkv.bias),
        (output.weight, output.bias),
        norm,
        mlp.gate_up.weight,
        down.weight,
        following,
    )


def norms_before(
    attention: Block, mlp: Block, input_norm: RMSNorm, post_attention_norm: RMSNorm
) -> tuple[BlockNorm, BlockNorm]:
    """A layer's norms; each rounds what one product alone reads, unless its scale is fixed."""
    return _norm_before(attention, input_norm), _norm_before(mlp, post_attention_norm)


def _norm_before(block: Block, norm: RMSNorm) -> BlockNorm:
    weight = _only_reader(block)
    rounding = weight.rounding if isinstance(weight, RoundingWeight) else None
    if rounding is None or not rounding.is_dynamic:
        return norm
    return RoundingNorm(norm.kernels, norm.weight, norm.eps, rounding)


def _only_reader(block: Block) -> Weight | None:
    """The weight that alone multiplies a block's input, as it is; None: others read it too."""
    if isinstance(block, PositionScaledAttention):
        block = block.attention
    if isinstance(block, Attention):
        return block.qkv.weight
    if isinstance(block, GatedAttention | GatedDeltaNet):
        return block.projection.weight
    return block.gate_up.weight if isinstance(block, GatedMLP) else None


def zero_centred(weights: WeightReader, name: str, size: int) -> Tensor:
    """A norm's weight, stored as its difference from 1; in fp32, as 1 + w rounds in 16 bits."""
    return 1.0 + weights.vector(name, size).float()


def load_norm(
    config: ModelConfig, weights: WeightReader, name: str, size: int | None = None
) -> RMSNorm:
    """The norm ``name`` over ``size`` features, by default the hidden size."""
    weight = weights.vector(f"{name}.weight", config.hidden_size if size is None else size)
    return RMSNorm(weights.kernels, weight, config.rms_norm_eps)


def load_centred_norm(config: ModelConfig, weights: WeightReader, name: str) -> RMSNorm:
    """The norm ``name`` over the hidden size, its weight ``zero_centred``."""
    weight = zero_centred(weights, f"{name}.weight", config.hidden_size)
    return RMSNorm(weights.kernels, weight, config.rms_norm_eps)


def load_head_norms(config: ModelConfig, weights: WeightReader, prefix: str) -> QKNorm:
    """The norms of every head of q and k of the attention block at ``prefix``."""
    q, k = (weights.vector(f"{prefix}.{one}_norm.weight", config.head_dim) for one in "qk")
    return QKNorm(q, k, config.rms_norm_eps)


def load_centred_head_norms(config: ModelConfig, weights: WeightReader, prefix: str) -> QKNorm:
    """As ``load_head_norms``, their weights ``zero_centred``."""
    q, k = (zero_centred(weights, f"{prefix}.{one}_norm.weight", config.head_dim) for one in "qk")
    return QKNorm(q, k, config.rms_norm_eps)


def attention_cache(config: ModelConfig, dtype: torch.dtype, window: int | None = None) -> PagedKV:
    """The cache declaration of an attention layer, over all ranks."""
    return PagedKV(config.num_kv_heads, config.head_dim, config.head_dim, dtype, window)


class AttentionHeads(NamedTuple):
    """How ranks divide the heads of an attention block: with a KV head go those that read it.

    Attributes:
        whole, own: shapes of all ranks, and of this rank.
        ranks_per_kv_head: adjacent ranks that have the same KV heads.
    """

    whole: AttentionShape
    own: AttentionShape
    ranks_per_kv_head: int

    def kv_part(self, name: str, permutation: Tensor | None = None) -> Part:
        """The projection ``name`` of keys or values; ``permutation`` is as in ``Part``."""
        same = (self.ranks_per_kv_head,)
        return Part(name, self.whole.kv_size, permutation, Split.ROWS, ranks_per_share=same)


def attention_heads(
    config: ModelConfig, weights: WeightReader, cache: PagedKV | None = None
) -> AttentionHeads:
    """The heads of an attention block, of which ``cache`` is the declaration over all ranks.

    Raises:
        UnsupportedError: the kernels do not support them.
    """
    size, heads = weights.parallel.size, config.num_heads
    cache = cache or attention_cache(config, weights.dtype)
    own = cache.divided(size)
    whole = AttentionShape(heads, cache.num_kv_heads, cache.k_dim, cache.window)
    shape = AttentionShape(heads // size, own.num_kv_heads, own.k_dim, own.window)
    weights.kernels.require(shape)
    return AttentionHeads(whole, shape, cache.ranks_per_head(size))


def load_mlp(config: ModelConfig, weights: WeightReader, prefix: str) -> GatedMLP:
    """Load the MLP at ``prefix``, with gate and up fused."""
    return load_gated_mlp(weights, prefix, config.hidden_size, config.intermediate_size)


def load_gated_mlp(
    weights: WeightReader, prefix: str, hidden: int, size: int, names: GatedNames = GATED
) -> GatedMLP:
    """Load the gated MLP at ``prefix``: ``hidden`` to ``size`` to ``hidden``."""
    gate_up = weights.linear(
        hidden,
        Part(f"{prefix}.{names.gate}", size, split=Split.ROWS),
        Part(f"{prefix}.{names.up}", size, split=Split.ROWS),
    )
    down = weights.row_parallel(size, Part(f"{prefix}.{names.down}", hidden))
    return GatedMLP(gate_up, down)
