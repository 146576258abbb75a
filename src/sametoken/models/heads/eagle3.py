"""The EAGLE-3 draft head (Li et al., arXiv:2503.01840): one decoder layer over target states.

Row p takes the token at p + 1 and the target's hidden states at p, and predicts the token at
p + 2. From the reference (SafeAILab/EAGLE ``eagle/model/cnets.py``), vLLM
(``vllm/model_executor/models/llama_eagle3.py``) and the library that trains most published heads
(vllm-project/speculators ``models/eagle3/model_definitions.py``):

- ``fc`` maps the concatenated auxiliary states [T, 3h] to h, once; drafted rows take the head's
  own state instead and skip ``fc``.
- Attention reads ``[input_layernorm(embedding) | hidden_norm(hidden)]``, 2h wide. The residual is
  ``hidden`` before its norm, or after it with ``norm_before_residual``.
- The next row takes the residual stream before the final norm; with ``norm_output`` (EAGLE 3.1)
  the one after it.
- With ``"use_aux_hidden_state": false`` under ``eagle_config`` (NVIDIA's v2 head for gpt-oss-120b)
  there is no ``fc``, and a row takes the target's state after its final norm as it is.
- ``norm_before_fc`` normalizes the whole concatenation, ``fc_norm`` each part.
- ``lm_head`` covers the draft vocabulary; draft id d is target id ``d + d2t[d]``.
- RoPE positions of rows need only be consistent: row p gets position p, as in vLLM.
- The layer may have a sliding window, by its config's ``layer_types`` or ``use_sliding_window``
  (vllm-project/speculators#684: what helps in contexts beyond those of its training).

Two checkpoint layouts are published:

- SafeAILab (also SpecForge, SGLang, TensorRT Model Optimizer): config.json describes a Llama, of
  which one layer is there, with ``draft_vocab_size`` and, where it differs, ``target_hidden_size``;
  tensors are ``midlayer.*``, ``fc.weight``, ``norm.weight``, ``lm_head.weight``, ``d2t`` [draft
  vocabulary] int64, ``t2d`` [vocabulary] bool and rarely ``embed_tokens.weight``
  (``eagle/model/cnets.py``; the published heads are ``pytorch_model.bin``).
- ``speculators`` (vllm-project): config.json has ``speculators_model_type``, the layer's config
  under ``transformer_layer_config`` and flags beside it; tensors are ``layers.0.*``,
  ``embed_tokens.weight`` and the rest as above (``models/eagle3/{config,core}.py``).
  ``norm_before_residual`` defaults to true, as in vLLM
  (``transformers_utils/configs/speculators/algos.py``).

Auxiliary layer ids: at the top of the config, i means the input of target layer i, as in vLLM
(``hidden_states + residual`` before the layer) and in ``Decoder.keeping``. With
``"eagle_aux_layer_semantics": "sglang"`` i means the output of layer i (vLLM ``eagle3_utils.py``).
Under ``eagle_config`` trainers write either; ids that begin with 1 mean outputs, and others inputs
(sgl-project/sglang#25454). NVIDIA's heads for gpt-oss have both: long-context says 1, 17 and 32 of
36, its trainer's default, which are outputs (NVIDIA/Model-Optimizer ``plugins/hf_eagle.py``), v3
says 24, 30 and 36, which only inputs can be. All default to (2, n // 2, n - 3) as inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.attention import Attention
from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import DecoderLayer, NoNorm
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.blocks import (
    attention_cache,
    layer_parts,
    load_attention,
    load_head_norms,
    load_mlp,
    load_norm,
    rotary_of,
)
from sametoken.models.decoder import Decoder
from sametoken.models.heads.base import (
    EagleHead,
    HeadCheckpoint,
    HeadStates,
    refuse,
    require_layers,
    require_sizes,
)
from sametoken.models.heads.layer_config import (
    layer_windows,
    read_head_quantization,
    read_layer_config,
)
from sametoken.models.heads.own_tokens import ascending, read_own_tokens
from sametoken.models.heads.reader import HeadReader
from sametoken.models.heads.stored_names import LAYER
from sametoken.models.load.files import read_settings
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.settings import COMPARE, MAX_LAYERS, Settings
from sametoken.models.load.weights import Part, WeightReader
from sametoken.models.registry import is_divisible
from sametoken.ops.backend import AttentionRows, KeptRows
from sametoken.ops.cache_types import PagedKV
from sametoken.ops.layer import WholeLayers, serves
from sametoken.ops.weight import Normed
from sametoken.state.caches import ModelCache
from sametoken.types.speculative_methods import default_aux_layers


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """A head's architecture.

    Attributes:
        layer: sizes of its decoder layer; ``layer.vocab_size`` is the target's vocabulary.
        window: of the layer's attention, in positions; None: full attention.
        draft_vocab_size: number of tokens that the head can propose.
        target_hidden_size: width of one auxiliary state.
        aux_layer_ids: target layers whose inputs it reads, None for the default; the number of
            target layers means the input of the final norm. (): it reads the last state alone.
    """

    layer: ModelConfig
    window: int | None
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @property
    def num_aux(self) -> int:
        """Number of the target's states that are concatenated."""
        return 3 if self.aux_layer_ids is None else len(self.aux_layer_ids)

    @property
    def has_token_map(self) -> bool:
        """Whether ``d2t`` limits it to a part of the target's vocabulary."""
        return self.draft_vocab_size != self.layer.vocab_size


def _head_config(settings: Settings) -> Eagle3Config:
    config, location = settings.values, settings.location
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UnsupportedError(
            f"{location} describes a {short(kind)} drafter", 'use a head for the method "eagle3"'
        )
    layer = read_layer_config(settings)
    own = Settings(settings.nested("eagle_config"), f"{location}: eagle_config")
    # SafeAILab's own code builds one layer, whatever the number; some of its heads say 40.
    says_depth = "speculators_model_type" in config or "eagle_config" in config
    refuse(
        location,
        (says_depth and layer.num_layers != 1, f"{layer.num_layers} decoder layers"),
        (config.get("fc_norm") and config.get("norm_before_fc"), "norms in two places before fc"),
    )
    target_hidden_size = settings.integer("target_hidden_size", layer.hidden_size)
    aux_layer_ids = _aux_layer_ids(settings, own)
    if not own.switch("use_aux_hidden_state", default=True):
        is_other = target_hidden_size != layer.hidden_size
        refuse(location, (is_other, "no fc and another hidden size than its target's"))
        aux_layer_ids = ()
    (window,) = layer_windows(replace(layer, num_layers=1), location)
    return Eagle3Config(
        layer=layer,
        window=window,
        draft_vocab_size=settings.integer("draft_vocab_size", layer.vocab_size, layer.vocab_size),
        target_hidden_size=target_hidden_size,
        aux_layer_ids=aux_layer_ids,
        norm_before_residual=settings.switch(
            "norm_before_residual", default="speculators_model_type" in config
        ),
        norm_before_fc=settings.switch("norm_before_fc", default=own.switch("norm_before_fc")),
        fc_norm=settings.switch("fc_norm"),
        norm_output=settings.switch("norm_output"),
    )


def _aux_layer_ids(settings: Settings, nested: Settings) -> tuple[int, ...] | None:
    key, location = "eagle_aux_hidden_state_layer_ids", settings.location
    ids = settings.get(key) or nested.get(key)
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= MAX_LAYERS for i in ids):
        raise CheckpointError(
            f"{location}: {key}={short(ids)} is not a list of layer numbers", COMPARE
        )
    if len(ids) > MAX_LAYERS:
        raise CheckpointError(f"{location}: {key} names {len(ids)} layers", COMPARE)
    is_sglang = settings.get("eagle_aux_layer_semantics") == "sglang"
    of_outputs = is_sglang if settings.get(key) else ids[0] == 1
    return tuple(i + of_outputs for i in ids)


@dataclass(frozen=True, slots=True)
class Eagle3Head(EagleHead):
    """The head's weights and its forward pass.

    Attributes:
        aux_norms: one over the whole concatenation, one per part, or none.
        fc: None where it reads no auxiliary states.
        layer: of an input that ``forward`` norms.
        norm: of the residual stream after it.
        whole: both in one call, if the backend has one.
    """

    config: Eagle3Config
    aux_norms: tuple[RMSNorm, ...]
    fc: Linear | None
    input_layernorm: RMSNorm
    hidden_norm: RMSNorm
    layer: DecoderLayer
    norm: RMSNorm
    whole: WholeLayers | None

    @property
    def nbytes(self) -> int:
        """See ``EagleHead``."""
        return self.layer.nbytes + (0 if self.fc is None else self.fc.nbytes)

    def target_states(self, hidden: HiddenStates, rows: Tensor | None) -> Tensor:
        """The target's auxiliary states, mapped to the head's hidden size, or its last state.

        In new memory.
        """
        if self.fc is not None:
            return self.combine(self.kernels.take_rows(hidden.auxiliary, rows))
        last = self.kernels.take_rows(hidden.last, rows)
        return last.clone() if rows is None else last

    def combine(self, auxiliary: Tensor) -> Tensor:
        """[T, num_aux * target_hidden] to [T, hidden], in new memory, if there is an ``fc``."""
        assert self.fc is not None
        if self.aux_norms:
            parts = auxiliary.chunk(len(self.aux_norms), dim=1)
            pairs = zip(self.aux_norms, parts, strict=True)
            auxiliary = torch.cat([norm(part) for norm, part in pairs], dim=1)
        return self.fc(auxiliary)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: KeptRows | None = None,
    ) -> HeadStates:
        """Run rows over paged KV; see ``EagleHead.forward``."""
        both = self.kernels.embed_beside(
            token_ids, self.embedding, self.input_layernorm, hidden, self.hidden_norm
        )
        residual = hidden
        if self.config.norm_before_residual:
            residual = both[:, hidden.shape[1] :].contiguous()
        last: Normed
        if self.whole is not None and serves(len(both), kept):
            last, residual = self.whole(both, residual, range(1), rows, cache.layers, kept)
        else:
            last, residual = self.layer(both, residual, self.norm, rows, cache.kv(0), kept=kept)
        assert isinstance(last, Tensor)
        return HeadStates(last, last if self.config.norm_output else residual)


def _aux_norms(reader: WeightReader, config: Eagle3Config) -> tuple[RMSNorm, ...]:
    part, layer = config.target_hidden_size, config.layer
    if config.norm_before_fc and config.num_aux:
        return (load_norm(layer, reader, "input_norm", config.num_aux * part),)
    count = config.num_aux if config.fc_norm else 0
    return tuple(load_norm(layer, reader, f"fc_norm.{i}", part) for i in range(count))


def _fc(reader: WeightReader, config: Eagle3Config) -> Linear | None:
    if not config.num_aux:
        return None
    part = Part("fc", config.layer.hidden_size)
    return reader.linear(config.num_aux * config.target_hidden_size, part)


def _attention(reader: WeightReader, config: Eagle3Config, max_positions: int) -> Attention:
    prefix, layer = f"{LAYER}.self_attn", config.layer
    has_norms = f"{prefix}.q_norm.weight" in reader
    qk_norm = load_head_norms(layer, reader, prefix) if has_norms else None
    rotary = rotary_of(layer, max_positions, reader.device)
    cache = attention_cache(layer, reader.dtype, config.window).within(max_positions)
    width = 2 * layer.hidden_size
    return load_attention(layer, reader, prefix, rotary, qk_norm, in_features=width, cache=cache)


class Eagle3Checkpoint(HeadCheckpoint[Eagle3Head]):
    """A directory with an EAGLE-3 head; a dummy's offsets ``d2t`` are zero."""

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        super().__init__(directory, load_format=load_format)
        given = read_settings(directory / "config.json")
        self.config = _head_config(given)
        self.quantization = read_head_quantization(given)
        if self.config.has_token_map:
            self.optional_tensors = ("lm_head.weight",)
            self.num_own_tokens = self.config.draft_vocab_size

    def require_fit(self, target: ModelConfig) -> None:
        """Refuse a target of another vocabulary, hidden size or depth."""
        config = self.config
        require_sizes(config.layer.vocab_size, config.target_hidden_size, target)
        self.aux_layers(target.num_layers)

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Layers of the target, in the order of ``fc``'s input."""
        ids = self.config.aux_layer_ids
        if ids is None:
            ids = default_aux_layers(num_target_layers)
        require_layers(ids, num_target_layers)
        return ids

    def is_divisible(self, size: int) -> bool:
        """See ``HeadCheckpoint``."""
        return is_divisible(Decoder, self.config.layer, self.quantization, size)

    def caches(self, dtype: torch.dtype) -> tuple[PagedKV, ...]:
        """See ``HeadCheckpoint``."""
        return (attention_cache(self.config.layer, dtype, self.config.window),)

    def _build(self, reader: HeadReader) -> Eagle3Head:
        config, layer, weights = self.config, self.config.layer, reader.weights
        norm = load_norm(layer, weights, "norm")
        decoder_layer = DecoderLayer(
            NoNorm(),
            _attention(weights, config, reader.max_positions),
            load_norm(layer, weights, f"{LAYER}.post_attention_layernorm"),
            load_mlp(layer, weights, f"{LAYER}.mlp"),
        )
        token_ids, permutation = reader.token_ids, None
        if config.has_token_map:
            assert token_ids is None
            own_ids, permutation = ascending(self._own_tokens())
            token_ids = own_ids.to(weights.device)
        return Eagle3Head(
            config=config,
            kernels=weights.kernels,
            caches=reader.caches(self.caches(weights.dtype)),
            parallel=weights.parallel,
            embedding=reader.embedding(layer.vocab_size, layer.hidden_size),
            aux_norms=_aux_norms(weights, config),
            fc=_fc(weights, config),
            input_layernorm=load_norm(layer, weights, f"{LAYER}.input_layernorm"),
            hidden_norm=load_norm(layer, weights, f"{LAYER}.hidden_norm"),
            layer=decoder_layer,
            norm=norm,
            whole=weights.kernels.whole_layers([layer_parts(decoder_layer, norm)]),
            lm_head=reader.lm_head(config.draft_vocab_size, layer.hidden_size, permutation),
            token_ids=token_ids,
        )

    def _own_tokens(self) -> Tensor:
        """[draft vocabulary] target ids of its map, in the file's order."""
        count, vocab_size = self.config.draft_vocab_size, self.config.layer.vocab_size
        if self._is_dummy:
            return torch.arange(count)
        source = open_weights(self._directory)
        return read_own_tokens(source, "d2t", count, vocab_size, as_offsets=True)
