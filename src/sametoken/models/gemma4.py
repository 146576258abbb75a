"""Gemma 4's text decoder.

Layers that see all have heads of another size than those with a window, fewer KV heads, and may
take their values from the projection of their keys; they rotate a part of each head. Values are
normed too. The last layers may read the KV of an earlier layer, with an MLP of twice the width.
Small models feed every layer an embedding of its own; one model adds routed experts to every MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.feed_forward import ExpertsBeside, GeluMLP
from sametoken.layers.layer_input import LayerEmbeddings, LayerInput
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import Block, BlockNorm, Matrices, NormedAfter, kept_of
from sametoken.layers.rotary import PROPORTIONAL, rotary_table
from sametoken.layers.shared_kv import NormedValueAttention
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import attention_heads, load_gated_mlp, load_norm
from sametoken.models.experts import load_experts
from sametoken.models.gemma import GemmaDecoder
from sametoken.models.layer_types import FULL, SLIDING, full_every
from sametoken.models.load.settings import (
    ANOTHER,
    COMPARE,
    MAX_EXPERTS,
    Settings,
    require_head_counts,
)
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.backend import KeptRows, QKNorm, RotaryTable, Routing
from sametoken.ops.cache_types import LayerCache, PagedKV
from sametoken.ops.weight import GeluExperts, Normed, UnquantizedWeight
from sametoken.state.caches import ModelCache

_ROPES = {
    FULL: {"rope_type": PROPORTIONAL, "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
#: The key with the elements of a layer's own embedding; 0: layers have none.
_LAYER_INPUT = "hidden_size_per_layer_input"
_ENCODERS = (
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
    "model.vision_embedder.",
)


class _LayerForm(NamedTuple):
    """What differs between layers.

    Attributes:
        window: positions that a row sees, its own included; None: all.
        source: index of the layer whose KV is read, its own or an earlier one.
        keys_are_values: whether values are made of the projection of keys.
    """

    head_dim: int
    num_kv_heads: int
    window: int | None
    source: int
    keys_are_values: bool


@dataclass(frozen=True, slots=True)
class Gemma4Layer(Matrices):
    """Attention and MLP between two norms each, what is beside them, and a factor on the whole.

    Attributes:
        attention: with the norm after it.
        experts: beside the MLP, which then has a norm of its own; None: none.
        layer_input: None: none.
        factor: [1], on the residual stream.
    """

    input_norm: RMSNorm
    attention: NormedAfter
    pre_feedforward_norm: RMSNorm
    mlp: Block
    experts: ExpertsBeside | None
    post_feedforward_norm: RMSNorm
    layer_input: LayerInput | None
    factor: Tensor

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        following: BlockNorm,
        *cache: Any,
        kept: KeptRows | None = None,
    ) -> tuple[Normed, Tensor]:
        """See ``Layer``; ``cache`` is rows, own KV, KV to read, and the layer's embedding."""
        *attended, embedded = cache
        out = self.attention(x, *attended, kept=kept)
        x, residual = self.pre_feedforward_norm.add(out, kept_of(residual, kept))
        out = self.mlp(x)
        if self.experts is not None:
            out = out + self.experts(residual)
        residual = residual + self.post_feedforward_norm(out)
        if self.layer_input is not None:
            residual = residual + self.layer_input(residual, kept_of(embedded, kept))
        residual = residual * self.factor
        return following(residual), residual


class Gemma4ForCausalLM(GemmaDecoder):
    """Gemma's decoder with layers of several forms.

    Attributes:
        layer_embeddings: of models that feed every layer an embedding of its own; None: of others.
    """

    refused = ("use_bidirectional_attention",)
    #: ``top_k_experts`` has this name here.
    ignored = (*GemmaDecoder.ignored, "num_experts_per_tok")
    aliases: ClassVar[Mapping[str, str]] = {
        **GemmaDecoder.aliases,
        "top_k_experts": "num_experts_per_tok",
    }
    implied: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """Ropes that a config leaves out; without images, "vision" is causal attention."""
        changed: dict[str, Any] = {
            "rope_parameters": _ROPES | settings.nested("rope_parameters"),
        }
        if settings.get("use_bidirectional_attention") == "vision":
            changed["use_bidirectional_attention"] = None
        return changed

    @staticmethod
    def divided_sizes(config: ModelConfig) -> dict[str, int]:
        """As ``Decoder.divided_sizes``, with experts."""
        settings = Settings(config.extra, config.architecture)
        sizes = GemmaDecoder.divided_sizes(config)
        if settings.switch("enable_moe_block"):
            sizes["moe_intermediate_size"] = settings.integer("moe_intermediate_size")
        return sizes

    @staticmethod
    def shared_sizes(config: ModelConfig) -> dict[str, int]:
        """As ``Decoder.shared_sizes``, with the KV heads of all layers."""
        sizes = GemmaDecoder.shared_sizes(config)
        for form in _layer_forms(config, config.architecture):
            if form.window is None:
                sizes["num_global_key_value_heads"] = form.num_kv_heads
        return sizes

    @classmethod
    def caches_of(
        cls, config: ModelConfig, dtype: torch.dtype, location: str
    ) -> tuple[LayerCache, ...]:
        """As ``Decoder.caches_of``; a layer that reads another's KV has no heads of its own."""
        return tuple(
            _kv_of(form, dtype, form.num_kv_heads if form.source == index else 0)
            for index, form in enumerate(_layer_forms(config, location))
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes of all matrices, tied ones once."""
        own = 0 if self.layer_embeddings is None else self.layer_embeddings.nbytes
        return super().weights_bytes + own

    def _memory(
        self, token_ids: Tensor, embedded: Tensor, cache: ModelCache, step: object
    ) -> Sequence[tuple[Any, ...]]:
        """A layer's own KV, the KV that it reads, and its embedding [T, P], if it has one."""
        layers: Sequence[Tensor | None] = [None] * len(self._forms)
        if self.layer_embeddings is not None:
            layers = self.layer_embeddings(token_ids, embedded).unbind(1)
        return [
            (own, cache.layers[form.source], layer)
            for own, form, layer in zip(cache.layers, self._forms, layers, strict=True)
        ]

    def _rotaries(self, device: torch.device) -> tuple[RotaryTable, ...]:
        tables: dict[tuple[bool, int], RotaryTable] = {}
        keys = [(form.window is None, form.head_dim) for form in self._forms]
        for sees_all, size in dict.fromkeys(keys):
            rope = self.config.rope if sees_all else self.config.local_rope
            assert rope is not None
            tables[sees_all, size] = rotary_table(
                rope, head_dim=size, max_positions=self._max_positions, device=device
            )
        return tuple(tables[key] for key in keys)

    @cached_property
    def _forms(self) -> tuple[_LayerForm, ...]:
        return _layer_forms(self.config, self.config.architecture)

    def _unused(self) -> tuple[str, ...]:
        """As ``Decoder._unused``, with the KV projections of layers that read another's KV."""
        shared = (index for index, form in enumerate(self._forms) if form.source != index)
        prefixes = tuple(
            f"{self._prefix}.layers.{index}.self_attn.{part}_"
            for index in shared
            for part in ("k", "v")
        )
        return super()._unused() + prefixes + (_ENCODERS if self.config.also_sees else ())

    def _load_embedding(self, weights: WeightReader) -> UnquantizedWeight:
        """As ``Decoder._load_embedding``; also the layers' own embeddings."""
        config, prefix = self.config, self._prefix
        settings = Settings(config.extra, weights.source.location)
        self.layer_embeddings: LayerEmbeddings | None = None
        if width := settings.count(_LAYER_INPUT):
            rows = settings.integer("vocab_size_per_layer_input")
            if rows < config.vocab_size:
                raise CheckpointError(
                    f"{settings.location}: vocab_size_per_layer_input={rows} is below vocab_size",
                    COMPARE,
                )
            columns = config.num_layers * width
            table = Part(f"{prefix}.embed_tokens_per_layer.weight", rows)
            projection = Part(f"{prefix}.per_layer_model_projection", columns)
            self.layer_embeddings = LayerEmbeddings(
                weights.packed(columns, table),
                weights.linear(config.hidden_size, projection),
                load_norm(config, weights, f"{prefix}.per_layer_projection_norm", width),
            )
        return super()._load_embedding(weights)

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Gemma4Layer:
        def norm(name: str) -> RMSNorm:
            return self._load_norm(weights, f"{prefix}.{name}_layernorm")

        config, prefix = self.config, f"{self._prefix}.layers.{index}"
        settings = Settings(config.extra, weights.source.location)
        size = config.intermediate_size
        if settings.switch("use_double_wide_mlp") and self._forms[index].source != index:
            size *= 2
        gated = load_gated_mlp(weights, f"{prefix}.mlp", config.hidden_size, size)
        mlp: Block = GeluMLP(self.kernels, gated.gate_up, gated.down)
        experts = None
        if settings.switch("enable_moe_block"):
            mlp = NormedAfter(
                mlp, self._load_norm(weights, f"{prefix}.post_feedforward_layernorm_1")
            )
            experts = self._load_experts(weights, prefix, settings)
        return Gemma4Layer(
            norm("input"),
            NormedAfter(self._load_attention(weights, index, rotary), norm("post_attention")),
            norm("pre_feedforward"),
            mlp,
            experts,
            norm("post_feedforward"),
            self._load_layer_input(weights, prefix, settings.count(_LAYER_INPUT)),
            weights.vector(f"{prefix}.layer_scalar", 1),
        )

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        config, form = self.config, self._forms[index]
        prefix, is_own = f"{self._prefix}.layers.{index}.self_attn", form.source == index
        read = _kv_of(form, weights.dtype, form.num_kv_heads).within(self._max_positions)
        heads = attention_heads(config, weights, read)
        whole, shape, _ = heads
        shape = replace(shape, score_factor=1.0)
        parts = [Part(f"{prefix}.q_proj", whole.q_size, split=Split.ROWS)]
        if is_own:
            names = ("k_proj",) if form.keys_are_values else ("k_proj", "v_proj")
            parts += [heads.kv_part(f"{prefix}.{name}") for name in names]
        bias, output = config.attention_bias, Part(f"{prefix}.o_proj", config.hidden_size)
        q_weight = weights.vector(f"{prefix}.q_norm.weight", form.head_dim)
        k_weight = weights.vector(f"{prefix}.k_norm.weight", form.head_dim) if is_own else q_weight
        return NormedValueAttention(
            self.kernels,
            shape,
            shape if is_own else replace(shape, num_kv_heads=0),
            weights.linear(config.hidden_size, *parts, bias=bias),
            weights.row_parallel(whole.q_size, output, bias=bias),
            rotary,
            QKNorm(q_weight, k_weight, config.rms_norm_eps),
            torch.ones_like(q_weight),
        )

    def _load_experts(
        self, weights: WeightReader, prefix: str, settings: Settings
    ) -> ExpertsBeside:
        hidden = self.config.hidden_size
        count = settings.integer("num_experts", most=MAX_EXPERTS)
        top_k = min(settings.integer("num_experts_per_tok"), count)
        scale = weights.vector(f"{prefix}.router.scale", hidden).float() * hidden**-0.5
        return ExpertsBeside(
            self.kernels,
            RMSNorm(self.kernels, scale, self.config.rms_norm_eps),
            weights.linear(hidden, Part(f"{prefix}.router.proj", count)),
            Routing(top_k, normalise=True),
            weights.vector(f"{prefix}.router.per_expert_scale", count).float(),
            self._load_norm(weights, f"{prefix}.pre_feedforward_layernorm_2"),
            load_experts(self.config, weights, f"{prefix}.experts", count, GeluExperts()),
            self._load_norm(weights, f"{prefix}.post_feedforward_layernorm_2"),
        )

    def _load_layer_input(
        self, weights: WeightReader, prefix: str, width: int
    ) -> LayerInput | None:
        if not width:
            return None
        hidden = self.config.hidden_size
        return LayerInput(
            self.kernels,
            weights.linear(hidden, Part(f"{prefix}.per_layer_input_gate", width)),
            weights.linear(width, Part(f"{prefix}.per_layer_projection", hidden)),
            self._load_norm(weights, f"{prefix}.post_per_layer_input_norm"),
        )


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """Gemma 4 12B: the same decoder without embeddings by layer, and with other defaults."""

    implied: ClassVar[Mapping[str, Any]] = {
        **{
            key: value
            for key, value in Gemma4ForCausalLM.implied.items()
            if not key.endswith("per_layer_input")
        },
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
    }


def _kv_of(form: _LayerForm, dtype: torch.dtype, num_kv_heads: int) -> PagedKV:
    return PagedKV(num_kv_heads, form.head_dim, form.head_dim, dtype, form.window)


def _layer_forms(config: ModelConfig, location: str) -> tuple[_LayerForm, ...]:
    """The form of each layer.

    Raises:
        CheckpointError: a setting is missing or impossible.
        UnsupportedError: a layer has a setting of its own that is not implemented.
    """
    settings = Settings(config.extra, location)
    types = list(settings.names("layer_types")) or full_every(6, config.num_layers)
    if len(types) != config.num_layers:
        raise CheckpointError(
            f"{location}: {len(types)} layer_types for {config.num_layers} layers", COMPARE
        )
    # As transformers has it, whatever a config says.
    types[-1] = FULL
    num_shared = settings.count("num_kv_shared_layers", most=config.num_layers)
    producers = types[: config.num_layers - num_shared]
    forms = []
    for index, layer_type in enumerate(types):
        window = settings.positions("sliding_window") if layer_type == SLIDING else None
        source = index
        if index >= len(producers):
            if layer_type not in producers:
                raise CheckpointError(
                    f"{location}: no layer has the KV that layer {index} shares", COMPARE
                )
            source = len(producers) - 1 - producers[::-1].index(layer_type)
        head_dim, num_kv_heads = _head_sizes(config, settings, source, window is None)
        keys_are_values = window is None and settings.switch("attention_k_eq_v")
        forms.append(_LayerForm(head_dim, num_kv_heads, window, source, keys_are_values))
    return tuple(forms)


def _head_sizes(
    config: ModelConfig, settings: Settings, index: int, sees_all: bool
) -> tuple[int, int]:
    """Elements of a layer's heads, and its KV heads: its own, or those of layers that see all."""
    own: dict[str, Any] = {}
    if settings.get("per_layer_config") is not None:
        # As newer versions of transformers write it.
        own = Settings(settings.nested("per_layer_config"), settings.location).nested(str(index))
    elif sees_all:
        own["head_dim"] = settings.integer("global_head_dim", 512)
        if settings.switch("attention_k_eq_v"):
            own["num_key_value_heads"] = settings.get("num_global_key_value_heads")
    unknown = own.keys() - {"head_dim", "num_key_value_heads"}
    if unknown:
        raise UnsupportedError(
            f"{settings.location}: per_layer_config sets {min(unknown)} of layer {index}, which is "
            "not supported",
            ANOTHER,
        )
    sizes = Settings(own, settings.location)
    head_dim = sizes.integer("head_dim", config.head_dim)
    num_kv_heads = sizes.integer("num_key_value_heads", config.num_kv_heads)
    require_head_counts(config.num_heads, num_kv_heads, head_dim, settings.location)
    return head_dim, num_kv_heads
