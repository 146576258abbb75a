"""The decoder body that architectures share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.kernels.interface import (
    AttentionRows,
    AttentionShape,
    Kernels,
    PackedWeight,
    QKNorm,
    RotaryTable,
)
from sametoken.layers.attention import Attention
from sametoken.layers.mlp import GatedMLP
from sametoken.layers.norm import RMSNorm
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.weights import Part, WeightReader
from sametoken.state.kv_cache import KVCache, KVSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Tables that old checkpoints carry although they follow from the config.
DERIVED_TENSORS = ("rotary_emb.inv_freq", "rope_freqs.weight")


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: norm, attention, norm, MLP."""

    input_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: GatedMLP

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's matrices."""
        linears = (self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down)
        return sum(linear.nbytes for linear in linears)


class Decoder:
    """Embedding, layers, final norm and head, as a ``CausalLM``.

    Architectures derive from it and say what differs.

    Args:
        config: the architecture.
        weights: where tensors come from, and the kernels that run them.
        max_positions: positions 0 .. max_positions - 1 can be run.
        aux_layers: layer indices i, 0 .. num_layers, whose input is kept in
            ``HiddenStates.auxiliary``, in the given order: the residual stream that enters
            decoder layer i, which is what layer i - 1 put out; i = num_layers is the stream
            that enters the final norm. EAGLE-3 in SafeAILab's and vLLM's code counts so.

    Attributes:
        embedding: token embeddings; with tied embeddings the same object as ``head``.
        head: the projection to logits.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or not finite.
        ConfigError: an auxiliary layer does not exist.
        UnsupportedError: the config asks for arithmetic that is not implemented.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        *,
        max_positions: int,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        _require_supported(config, weights.source.location)
        if not all(0 <= layer <= config.num_layers for layer in aux_layers):
            raise ConfigError(
                f"auxiliary layers {aux_layers} do not all exist",
                f"use indices from 0 to {config.num_layers}",
            )
        self.config = config
        self.kv_spec = KVSpec(
            config.num_layers, config.num_kv_heads, config.head_dim, weights.dtype
        )
        self.kernels: Kernels = weights.kernels
        self._aux_layers = aux_layers
        rotary = rotary_table(
            config.rope,
            head_dim=config.head_dim,
            max_positions=max_positions,
            device=weights.device,
        )
        vocabulary = Part(EMBEDDING, config.vocab_size)
        self.embedding = weights.packed(config.hidden_size, vocabulary)
        self._layers = tuple(
            self._load_layer(weights, f"model.layers.{i}", rotary) for i in range(config.num_layers)
        )
        self._final_norm = self._load_norm(weights, "model.norm")
        self.head = self._load_head(weights)
        weights.require_all_read(allowed=DERIVED_TENSORS)

    @staticmethod
    def load_qk_norm(config: ModelConfig, weights: WeightReader, prefix: str) -> QKNorm | None:
        """The norm of q and k of the attention block at ``prefix``; most have none."""
        return None

    def forward(self, token_ids: Tensor, rows: AttentionRows, kv: KVCache) -> HiddenStates:
        """[T] ids to hidden states; writes the rows' KV and reads their slots'."""
        residual = self.kernels.embedding(token_ids, self.embedding)
        auxiliary: dict[int, Tensor] = {}
        x = self._layers[0].input_norm(residual)
        for index, layer in enumerate(self._layers):
            self._keep(auxiliary, index, residual)
            x = layer.attention(x, rows, kv.layer(index))
            x, residual = layer.post_attention_norm.add(x, residual)
            x, residual = self._norm_after(index).add(layer.mlp(x), residual)
        self._keep(auxiliary, len(self._layers), residual)
        kept = [auxiliary[index] for index in self._aux_layers]
        return HiddenStates(x, torch.cat(kept, dim=-1) if kept else x.new_empty(x.shape[0], 0))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden] (after the final norm) to [L, V] fp32."""
        return self.kernels.logits(hidden, self.head)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all matrices, tied ones once."""
        head_bytes = 0 if self.head is self.embedding else self.head.nbytes
        return self.embedding.nbytes + head_bytes + sum(layer.nbytes for layer in self._layers)

    def _norm_after(self, index: int) -> RMSNorm:
        last = index + 1 == len(self._layers)
        return self._final_norm if last else self._layers[index + 1].input_norm

    def _keep(self, auxiliary: dict[int, Tensor], index: int, residual: Tensor) -> None:
        # A copy: the next norm may reuse the stream's memory.
        if index in self._aux_layers:
            auxiliary[index] = residual.clone()

    def _load_layer(self, weights: WeightReader, prefix: str, rotary: RotaryTable) -> DecoderLayer:
        config = self.config
        qk_norm = self.load_qk_norm(config, weights, f"{prefix}.self_attn")
        return DecoderLayer(
            self._load_norm(weights, f"{prefix}.input_layernorm"),
            load_attention(config, weights, f"{prefix}.self_attn", rotary, qk_norm),
            self._load_norm(weights, f"{prefix}.post_attention_layernorm"),
            load_mlp(config, weights, f"{prefix}.mlp"),
        )

    def _load_norm(self, weights: WeightReader, name: str) -> RMSNorm:
        weight = weights.vector(f"{name}.weight", self.config.hidden_size)
        return RMSNorm(self.kernels, weight, self.config.rms_norm_eps)

    def _load_head(self, weights: WeightReader) -> PackedWeight:
        if self.config.tie_word_embeddings:
            if HEAD in weights:
                weights.require_equal(EMBEDDING, HEAD)
            return self.embedding
        return weights.packed(self.config.hidden_size, Part(HEAD, self.config.vocab_size))


def load_attention(
    config: ModelConfig,
    weights: WeightReader,
    prefix: str,
    rotary: RotaryTable,
    qk_norm: QKNorm | None = None,
    *,
    in_features: int | None = None,
) -> Attention:
    """The attention block at ``prefix``, with q, k and v fused.

    Args:
        config: head counts and whether projections have biases.
        weights: where tensors come from.
        prefix: what the block's tensor names begin with.
        rotary: the model's table.
        qk_norm: the norm of q and k, if there is one.
        in_features: width of the block's input; default the hidden size.
    """
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim)
    weights.kernels.require(shape)
    qkv = weights.linear(
        config.hidden_size if in_features is None else in_features,
        Part(f"{prefix}.q_proj", shape.q_size),
        Part(f"{prefix}.k_proj", shape.kv_size),
        Part(f"{prefix}.v_proj", shape.kv_size),
        bias=config.attention_bias,
    )
    output_part = Part(f"{prefix}.o_proj", config.hidden_size)
    output = weights.linear(shape.q_size, output_part, bias=config.attention_bias)
    return Attention(weights.kernels, shape, qkv, output, rotary, qk_norm)


def load_mlp(config: ModelConfig, weights: WeightReader, prefix: str) -> GatedMLP:
    """The MLP at ``prefix``, with gate and up fused."""
    gate_up = weights.linear(
        config.hidden_size,
        Part(f"{prefix}.gate_proj", config.intermediate_size),
        Part(f"{prefix}.up_proj", config.intermediate_size),
    )
    down = weights.linear(config.intermediate_size, Part(f"{prefix}.down_proj", config.hidden_size))
    return GatedMLP(weights.kernels, gate_up, down)


def _require_supported(config: ModelConfig, location: str) -> None:
    settings = config.extra
    windowed = settings.get("use_sliding_window", settings.get("sliding_window") is not None)
    layer_types = settings.get("layer_types") or ()
    for unsupported, what in (
        (
            settings.get("hidden_act", "silu") != "silu",
            f"hidden_act={settings.get('hidden_act')!r}",
        ),
        (settings.get("mlp_bias"), "mlp_bias=true"),
        (windowed, f"sliding_window={settings.get('sliding_window')!r}"),
        (set(layer_types) - {"full_attention"}, f"layer_types={sorted(set(layer_types))}"),
    ):
        if unsupported:
            raise UnsupportedError(f"{location}: {what} is not supported", "use another checkpoint")
