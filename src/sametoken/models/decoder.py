"""The decoder that all architectures share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sametoken.layers.attention import Attention
from sametoken.layers.norm import RMSNorm
from sametoken.layers.parallel import SINGLE_RANK, gather_columns
from sametoken.layers.residual import Block, BlockNorm, DecoderLayer, Layer
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.blocks import (
    Biases,
    attention_cache,
    layer_parts,
    load_attention,
    load_mlp,
    load_norm,
    norms_before,
    rotary_of,
)
from sametoken.models.layer_types import FULL, REFUSED, SLIDING, require_supported, sliding_windows
from sametoken.models.load.kv_scheme import with_scales
from sametoken.models.load.quantization import kv_strategy
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.backend import AttentionRows, KeptRows, QKNorm, RotaryTable
from sametoken.ops.cache_types import LayerCache, PagedKV, Recurrent
from sametoken.ops.layer import WholeLayers, serves
from sametoken.ops.model.recurrent.rule import RecurrentPass
from sametoken.ops.weight import UnquantizedWeight, Weight
from sametoken.state.caches import ModelCache

HEAD = "lm_head.weight"
# Tables in old checkpoints that are derived from the config.
DERIVED_TENSORS = ("rotary_emb.inv_freq",)
#: Prefixes of tensors that are not read, of checkpoints that also see images.
_ENCODERS = ("visual.", "vision_tower.", "multi_modal_projector.")
ENCODER_PREFIXES = (*_ENCODERS, *(f"model.{prefix}" for prefix in _ENCODERS))


class Decoder:
    """Embedding, layers, final norm and head, as a ``CausalLM``.

    Architectures are subclasses.

    Args:
        config: the architecture.
        weights: reader of the tensors, with the kernels that run them.
        max_positions: positions 0 .. max_positions - 1 can be run.
        rotaries: as in another decoder of this config, device and number of positions.

    Attributes:
        rotaries: the rotary table of each layer.
        embedding, final_norm: of tokens, and of the last layer's output; whole on every rank.
        head: the projection to logits, or this rank's rows of it; with tied embeddings and one
            rank the same object as ``embedding``.
        layers: in order.
        caches: the cache declaration of each layer, on this rank.
        layer_types: the supported values of a config's ``layer_types``.
        unused_prefixes: prefixes of tensor names that the class does not use.
        aliases: other names of keys, as a config.json may have them, with the name read here.
        implied: transformers' defaults for keys that a config.json omits.
        ignored: keys that other classes read, and that transformers' class passes over.
        ties_by_default: whether a config that also has a vision tower ties embedding and head where
            its top says nothing and no head is stored.
        local_theta: the rotary base of layers with a sliding window where a config omits it; None:
            all layers share their rotary settings.
        activation: the only activation of MLPs.
        refused: keys whose settings are not implemented.
        rotates_parts: whether a config may rotate only a part of each head.
        text_prefixes: of the text decoder's tensors in checkpoints that also see images.
        embedding_name, final_norm_name: names of their tensors, without prefix and ``.weight``.
        attention_name: that of a layer's attention block.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or not finite.
        UnsupportedError: the config needs an operation that is not implemented.
    """

    layer_types: ClassVar[frozenset[str]] = frozenset((FULL,))
    unused_prefixes: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[Mapping[str, str]] = {}
    implied: ClassVar[Mapping[str, Any]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    ties_by_default: ClassVar[bool] = False
    local_theta: ClassVar[float | None] = None
    activation: ClassVar[str] = "silu"
    refused: ClassVar[tuple[str, ...]] = REFUSED
    rotates_parts: ClassVar[bool] = False
    text_prefixes: ClassVar[tuple[str, ...]] = ("model.language_model", "language_model.model")
    embedding_name: ClassVar[str] = "embed_tokens"
    final_norm_name: ClassVar[str] = "norm"
    attention_name: ClassVar[str] = "self_attn"

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        *,
        max_positions: int,
        rotaries: tuple[RotaryTable, ...] | None = None,
    ) -> None:
        require_supported(
            config,
            self.layer_types,
            weights.source.location,
            activation=self.activation,
            refused=self.refused,
        )
        self.config = config
        self._declared = self.caches_of(config, weights.dtype, weights.source.location)
        self._prefix = self.tensor_prefix(weights)
        self.caches = tuple(self._own_cache(weights, *each) for each in enumerate(self._declared))
        self.kernels, self._parallel = weights.kernels, weights.parallel
        self._divided_from = weights if weights.parallel.size > 1 else None
        self._max_positions = max_positions
        self._aux_layers: tuple[int, ...] = ()
        self.rotaries = self._rotaries(weights.device) if rotaries is None else rotaries
        self.embedding = self._load_embedding(weights)
        self.layers = tuple(self._load_layer(weights, *each) for each in enumerate(self.rotaries))
        self.final_norm = self._load_norm(weights, f"{self._prefix}.{self.final_norm_name}")
        self.head = self._load_head(weights)
        self._whole = self._whole_layers()
        weights.require_all_read(allowed=DERIVED_TENSORS, unused=self._unused())

    def reloaded(self, weights: WeightReader) -> Decoder:
        """The same model with other weights; errors as in the class."""
        return type(self)(self.config, weights, max_positions=self._max_positions)

    def keeping(self, aux_layers: tuple[int, ...]) -> Self:
        """The same model, which also returns the inputs of layers, as EAGLE-3 reads them.

        Args:
            aux_layers: 0 .. num_layers, in the order of ``HiddenStates.auxiliary``: i is the
                residual stream that enters layer i, or the final norm, as in SafeAILab and vLLM.
        """
        assert all(0 <= layer <= self.config.num_layers for layer in aux_layers)
        kept = copy(self)
        kept._aux_layers = aux_layers
        return kept

    def with_layers(self, layers: tuple[Layer, ...]) -> Self:
        """The same model with other layers, of equal caches."""
        other = copy(self)
        other.layers = layers
        other._whole = other._whole_layers()
        return other

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """A config's own keys by the names that all architectures share; changed ones only.

        Raises:
            CheckpointError: a value is missing or impossible.
        """
        return {}

    @classmethod
    def tensor_prefix(cls, weights: WeightReader) -> str:
        """Prefix of all tensor names except the head's."""
        seeing = (one for one in cls.text_prefixes if f"{one}.embed_tokens.weight" in weights)
        return next(seeing, "model")

    @staticmethod
    def dummy_names(config: ModelConfig) -> tuple[str, ...]:
        """What random weights show ``tensor_prefix``: a config names its formats' exceptions so."""
        return (f"{Decoder.text_prefixes[0]}.embed_tokens.weight",) if config.also_sees else ()

    @staticmethod
    def divided_sizes(config: ModelConfig) -> dict[str, int]:
        """Sizes that ranks must divide evenly, by key in config.json."""
        return {
            "num_attention_heads": config.num_heads,
            "intermediate_size": config.intermediate_size,
        }

    @staticmethod
    def shared_sizes(config: ModelConfig) -> dict[str, int]:
        """Sizes that ranks must divide evenly, or divide the ranks; by key in config.json."""
        return {"num_key_value_heads": config.num_kv_heads}

    @classmethod
    def caches_of(
        cls, config: ModelConfig, dtype: torch.dtype, location: str
    ) -> tuple[LayerCache, ...]:
        """The cache declaration of each layer, over all ranks; known before weights are loaded.

        Raises:
            CheckpointError: a size is missing or impossible.
        """
        if SLIDING not in cls.layer_types:
            return (attention_cache(config, dtype),) * config.num_layers
        windows = sliding_windows(config, location)
        return tuple(attention_cache(config, dtype, window) for window in windows)

    @staticmethod
    def biases(config: ModelConfig) -> Biases:
        """Which projections of attention have biases; by default ``attention_bias`` says so."""
        return Biases(config.attention_bias, config.attention_bias)

    @staticmethod
    def load_qk_norm(config: ModelConfig, weights: WeightReader, prefix: str) -> QKNorm | None:
        """The norm of q and k of the attention block at ``prefix``; None by default."""
        return None

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The MLP at ``prefix``, of the layer of that index."""
        return load_mlp(config, weights, prefix)

    def forward(
        self,
        token_ids: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: KeptRows | None = None,
    ) -> HiddenStates:
        """See ``CausalLM.forward``; with ``kept``, no state behind the last layer is auxiliary."""
        assert kept is None or len(self.layers) not in self._aux_layers
        step = self.kernels.begin_pass(rows, cache.folded) if cache.folded else None
        residual = self._embed(token_ids)
        memory = self._memory(token_ids, residual, cache, step)
        num_rows, hidden_size = residual.shape
        auxiliary = residual.new_empty(num_rows, len(self._aux_layers) * hidden_size)
        x = self.layers[0].input_norm(residual)
        whole = self._whole if serves(num_rows, kept) else None
        index, count = 0, len(self.layers)
        while index < count:
            self._keep(auxiliary, index, residual)
            end = index if whole is None else self._end_of_call(whole, index)
            # Only the last layer may drop rows: an earlier one's outputs become the next one's KV.
            wanted = kept if max(end, index + 1) == count else None
            if whole is not None and end > index:
                assert isinstance(x, Tensor)
                of_call = range(index, end)
                x, residual = whole(x, residual, of_call, rows, cache.layers, wanted)
                index = end
                continue
            of_layer = step if isinstance(self.caches[index], Recurrent) else rows
            following = self._norm_after(index)
            x, residual = self.layers[index](
                x, residual, following, of_layer, *memory[index], kept=wanted
            )
            index += 1
        self._keep(auxiliary, len(self.layers), residual)
        if step is not None:
            step.finish()
        assert isinstance(x, Tensor)
        return HiddenStates(x, auxiliary)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden] (after the final norm) to [L, V] fp32."""
        own = self.compute_rank_logits(hidden)
        return gather_columns(self._parallel, own, self.config.vocab_size)

    def compute_rank_logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden] to this rank's columns of the logits, [L, ceil(V / size)] fp32."""
        return self.head.matmul(hidden, out_dtype=torch.float32)

    def whole_head(self) -> Weight:
        """The head with all its rows, for drafters that ranks do not divide or that cut it.

        A rank with a part of the head reads all of it from the checkpoint, unless it is tied to
        the embedding; errors as in the class.
        """
        if self._divided_from is None:
            return self.head
        if self.config.tie_word_embeddings:
            return self.embedding
        whole = replace(self._divided_from, parallel=SINGLE_RANK)
        vocabulary = Part(self._head_name, self.config.vocab_size)
        return whole.linear(self.config.hidden_size, vocabulary).weight

    @property
    def weights_bytes(self) -> int:
        """Bytes of all matrices, tied ones once."""
        head_bytes = 0 if self.head is self.embedding else self.head.nbytes
        return self.embedding.nbytes + head_bytes + sum(layer.nbytes for layer in self.layers)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T] ids to the residual stream that enters the first layer."""
        return self.embedding.rows(token_ids)

    def _memory(
        self, token_ids: Tensor, embedded: Tensor, cache: ModelCache, step: RecurrentPass | None
    ) -> Sequence[tuple[Any, ...]]:
        """What each layer reads beside the pass's rows: its memory.

        Args:
            token_ids, embedded: [T], and [T, hidden] as ``_embed`` gives it.
            cache, step: the memory of all layers, and the pass of recurrent ones, if any.
        """
        return [(layer,) for layer in cache.layers]

    def _rotaries(self, device: torch.device) -> tuple[RotaryTable, ...]:
        """The rotary table of each layer."""
        config, positions = self.config, self._max_positions
        shared = rotary_of(config, positions, device)
        if config.local_rope is None:
            return (shared,) * config.num_layers
        local = rotary_of(replace(config, rope=config.local_rope), positions, device)
        windows = (isinstance(cache, PagedKV) and cache.window for cache in self._declared)
        return tuple(local if window else shared for window in windows)

    def _unused(self) -> tuple[str, ...]:
        """Prefixes of tensor names that this checkpoint may have, and that are not read."""
        return self.unused_prefixes + (ENCODER_PREFIXES if self.config.also_sees else ())

    def _whole_layers(self) -> WholeLayers | None:
        """Layers that the backend runs in one call, if it has any."""
        norms = map(self._norm_after, range(len(self.layers)))
        return self.kernels.whole_layers([*map(layer_parts, self.layers, norms)])

    def _end_of_call(self, whole: WholeLayers, index: int) -> int:
        """The layer after those that one call runs from ``index`` on; itself if there are none."""
        # A residual stream that is kept is that between two calls.
        kept = (layer for layer in self._aux_layers if layer > index)
        return min((whole.ends[index], *kept))

    def _norm_after(self, index: int) -> BlockNorm:
        last = index + 1 == len(self.layers)
        return self.final_norm if last else self.layers[index + 1].input_norm

    def _keep(self, auxiliary: Tensor, index: int, residual: Tensor) -> None:
        """Copy the residual stream that enters a layer to its columns of ``auxiliary``."""
        width = residual.shape[1]
        for place, layer in enumerate(self._aux_layers):
            if layer == index:
                auxiliary[:, place * width : (place + 1) * width] = residual

    def _embedding_name(self, weights: WeightReader) -> str:
        return f"{self._prefix}.{self.embedding_name}.weight"

    @property
    def _head_name(self) -> str:
        # Beside the decoder's "model", and at the top where the decoder is "model.language_model".
        beside = "language_model." if self._prefix == "language_model.model" else ""
        return beside + HEAD.removesuffix(".weight")

    def _load_embedding(self, weights: WeightReader) -> UnquantizedWeight:
        vocabulary = Part(self._embedding_name(weights), self.config.vocab_size)
        return weights.packed(self.config.hidden_size, vocabulary)

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Layer:
        prefix = f"{self._prefix}.layers.{index}"
        attention = self._load_attention(weights, index, rotary)
        mlp = self.load_layer_mlp(self.config, weights, f"{prefix}.mlp", index)
        names = ("input_layernorm", "post_attention_layernorm")
        norms = (self._load_norm(weights, f"{prefix}.{name}") for name in names)
        norm, between = norms_before(attention, mlp, *norms)
        return DecoderLayer(norm, attention, between, mlp)

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        return self._self_attention(weights, index, rotary)

    def _self_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Attention:
        config, prefix = self.config, f"{self._prefix}.layers.{index}.self_attn"
        qk_norm, biases = self.load_qk_norm(config, weights, prefix), self.biases(config)
        cache = self._cache_of(index)
        return load_attention(config, weights, prefix, rotary, qk_norm, cache=cache, biases=biases)

    def _cache_of(self, index: int) -> PagedKV:
        """The cache of an attention layer over all ranks, as its kernels see it."""
        cache = self._declared[index]
        assert isinstance(cache, PagedKV)
        return cache.within(self._max_positions)

    def _own_cache(self, weights: WeightReader, index: int, declared: LayerCache) -> LayerCache:
        """A layer's declaration on this rank, with its scales."""
        own = declared.divided(weights.parallel.size)
        if isinstance(own, Recurrent):
            weights.kernels.require_rule(own.rule)
        strategy = kv_strategy(self.config.extra, weights.source.location)
        if strategy is None:
            return own
        prefix = f"{self._prefix}.layers.{index}.{self.attention_name}"
        return with_scales(declared, weights, prefix, strategy)

    def _load_norm(self, weights: WeightReader, name: str) -> RMSNorm:
        return load_norm(self.config, weights, name)

    def _load_head(self, weights: WeightReader) -> Weight:
        vocabulary = Part(self._head_name, self.config.vocab_size, split=Split.ROWS)
        if not self.config.tie_word_embeddings:
            weights.require_head(self._head_name)
            return weights.linear(self.config.hidden_size, vocabulary).weight
        weights.require_tied(self._embedding_name(weights), self._head_name)
        tied = replace(vocabulary, name=self._embedding_name(weights))
        one_rank = weights.parallel.size == 1
        return self.embedding if one_rank else weights.packed(self.config.hidden_size, tied)
