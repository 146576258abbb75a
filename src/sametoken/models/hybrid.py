"""What hybrids of Gated DeltaNet and gated attention share (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import ClassVar

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.kernels.interface import AttentionRows, AttentionShape, QKNorm, RotaryTable
from sametoken.layers.gated_attention import GatedAttention
from sametoken.layers.gated_delta_net import GatedDeltaNet
from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.decoder import Block, Decoder, DecoderLayer, attention_shapes, load_mlp
from sametoken.models.experts import load_sparse_moe
from sametoken.models.settings import MAX_HEAD_DIM, Settings
from sametoken.models.weights import Part, Split, WeightReader
from sametoken.state.kv_cache import KVCache, KVSpec
from sametoken.state.recurrent import GatedDeltaParams, RecurrentSpec

FULL, LINEAR = "full_attention", "linear_attention"
TEXT_PREFIX = "model.language_model"


@dataclass(frozen=True, slots=True)
class _Mixer:
    """A layer's kind, and its index among the layers of that kind."""

    is_linear: bool
    index: int


class HybridDecoder(Decoder, ABC):
    """A decoder in whose ``layer_types`` some layers are Gated DeltaNet.

    Norm weights are stored as their difference from 1. Tensors of a multi-token-prediction
    head and of a vision tower are left unread. Architectures say how the projection into a
    Gated DeltaNet block is stored.
    """

    layer_types: ClassVar[frozenset[str]] = frozenset((FULL, LINEAR))
    unused_prefixes: ClassVar[tuple[str, ...]] = ("mtp.", "model.visual.")

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        *,
        max_positions: int,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        location = weights.source.location
        self._whole_spec = recurrent_spec(config, weights.dtype, location)
        self._mixers = _mixers(config, location)
        super().__init__(config, weights, max_positions=max_positions, aux_layers=aux_layers)
        if self._whole_spec.num_layers:
            self.recurrent_spec = self._whole_spec.divided(weights.parallel.size)

    @staticmethod
    def tensor_prefix(weights: WeightReader) -> str:
        """The decoder's own, or what it is called inside a model that also sees."""
        nested = f"{TEXT_PREFIX}.embed_tokens.weight" in weights
        return TEXT_PREFIX if nested else Decoder.tensor_prefix(weights)

    @staticmethod
    @abstractmethod
    def load_projection(
        spec: RecurrentSpec, weights: WeightReader, prefix: str, in_features: int
    ) -> Linear:
        """The fused projection to [q | k | v | z | b | a] of the block at ``prefix``.

        Args:
            spec: head counts of all ranks together, which divide them.
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
        if any(mixer.is_linear for mixer in _mixers(config, settings.location)):
            sizes["linear_num_key_heads"] = settings.integer("linear_num_key_heads")
        sparse = [_is_sparse(config, index) for index in range(config.num_layers)]
        if not all(sparse):
            sizes["intermediate_size"] = dense_size
        if any(sparse):
            for key in ("moe_intermediate_size", "shared_expert_intermediate_size"):
                sizes[key] = settings.integer(key)
        return sizes

    @staticmethod
    def kv_spec_of(config: ModelConfig, dtype: torch.dtype, num_ranks: int) -> KVSpec:
        """As ``Decoder.kv_spec_of``: only layers of full attention have KV."""
        num_full = sum(not mixer.is_linear for mixer in _mixers(config, config.architecture))
        spec = Decoder.kv_spec_of(config, dtype, num_ranks)
        return replace(spec, num_layers=num_full)

    def forward(self, token_ids: Tensor, rows: AttentionRows, kv: KVCache) -> HiddenStates:
        """[T] ids to hidden states; advances the rows' slots and writes their KV."""
        step = kv.recurrent.begin(rows) if kv.recurrent else None

        def mix(index: int, x: Tensor) -> Tensor:
            mixer, block = self._mixers[index], self._layers[index].attention
            if mixer.is_linear:
                return block(x, step, mixer.index)
            return block(x, rows, kv.layer(mixer.index))

        hidden = self._run_layers(token_ids, mix)
        if step is not None:
            step.finish()
        return hidden

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> DecoderLayer:
        prefix = f"{self._prefix}.layers.{index}"
        mixer: Block
        if self._mixers[index].is_linear:
            mixer = self._load_gated_delta_net(weights, f"{prefix}.linear_attn")
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

    def _load_gated_delta_net(self, weights: WeightReader, prefix: str) -> GatedDeltaNet:
        spec, hidden = self._whole_spec, self.config.hidden_size
        out_part = Part(f"{prefix}.out_proj", hidden)
        return GatedDeltaNet(
            kernels=self.kernels,
            spec=spec.divided(weights.parallel.size),
            projection=self.load_projection(spec, weights, prefix, hidden),
            params=_load_params(spec, weights, prefix),
            norm_weight=weights.vector(f"{prefix}.norm.weight", spec.value_dim),
            eps=self.config.rms_norm_eps,
            output=weights.row_parallel(spec.num_value_heads * spec.value_dim, out_part),
        )


def _load_params(spec: RecurrentSpec, weights: WeightReader, prefix: str) -> GatedDeltaParams:
    """Weights of the convolution, and of the gates in fp32; ranks divide them with their heads."""
    heads, channels, rows = spec.num_value_heads, spec.conv_channels, Split.ROWS
    conv = Part(f"{prefix}.conv1d.weight", channels, split=rows, runs=spec.qkv_sizes)

    def by_head(name: str) -> Tensor:
        return weights.tensor(Part(f"{prefix}.{name}", heads, split=rows), dtype=torch.float32)

    return GatedDeltaParams(
        A_log=by_head("A_log"),
        dt_bias=by_head("dt_bias"),
        conv_weight=weights.tensor(conv, (1, spec.conv_kernel)).squeeze(1).t().contiguous(),
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


def recurrent_spec(config: ModelConfig, dtype: torch.dtype, location: str) -> RecurrentSpec:
    """What the config's Gated DeltaNet layers need per slot.

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
    return RecurrentSpec(
        num_layers=sum(mixer.is_linear for mixer in _mixers(config, location)),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_kernel=settings.integer("conv_kernel_dim"),
        conv_channels=2 * key_heads * key_dim + value_heads * value_dim,
        dtype=dtype,
    )


def _mixers(config: ModelConfig, location: str) -> tuple[_Mixer, ...]:
    settings = Settings(config.extra, location)
    interval = settings.integer("full_attention_interval", 4)
    implied = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(config.num_layers)]
    types = settings.names("layer_types") or tuple(implied)
    if len(types) != config.num_layers:
        raise CheckpointError(
            f"{location}: layer_types={short(types)} does not name {config.num_layers} layers",
            "compare with the original checkpoint's",
        )
    return tuple(_Mixer(kind == LINEAR, types[:i].count(kind)) for i, kind in enumerate(types))


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
