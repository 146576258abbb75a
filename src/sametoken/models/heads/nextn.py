"""The NextN module of DeepSeek-V3, its kin and GLM-4 MoE: multi-token prediction.

Row p takes the token at p + 1 and the target's last hidden state at p, and predicts the token at
p + 2 (DeepSeek-V3, arXiv 2412.19437, section 2.2). From vLLM
(``vllm/model_executor/models/deepseek_mtp.py``, ``glm4_moe_mtp.py``):

- ``eh_proj`` maps ``[enorm(embedding) | hnorm(hidden)]``, 2h wide, to h, without a bias. The
  embedding of the row at position 0 is zeroed.
- The target's state is the one after its final norm. The module's own state, which the next row
  takes, is the one *before* ``shared_head.norm``; the logits are made from it after that norm.
- One layer like the target's last follows, with KV of its own. It runs for every draft.

The target's own checkpoint contains the module as one layer past the last,
``model.layers.{num_hidden_layers}``: ``enorm``, ``hnorm``, ``eh_proj``, ``shared_head.norm`` and an
ordinary layer. Its ``embed_tokens`` and ``shared_head.head`` are copies of the target's, which are
used in their place; other ones are the module's own, quantized or not. transformers ignores all of
it.

Config key: ``num_nextn_predict_layers``; without it there is one layer.
"""

from __future__ import annotations

from pathlib import Path

import torch

from sametoken.errors import UnsupportedError
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import DecoderLayer
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_norm
from sametoken.models.decoder import HEAD
from sametoken.models.heads.mtp_form import ANOTHER_METHOD, Module, ModuleCheckpoint, ModuleHead
from sametoken.models.heads.reader import HeadReader
from sametoken.models.load.kv_scheme import has_scales, with_scales
from sametoken.models.load.quantization import kv_strategy
from sametoken.models.load.settings import Settings
from sametoken.models.load.sources import TensorSource
from sametoken.models.load.weights import Part, WeightReader
from sametoken.models.nextn_target import NextNTarget, nextn_prefix
from sametoken.models.registry import ARCHITECTURES
from sametoken.ops.cache_types import LayerCache
from sametoken.ops.weight import UnquantizedWeight, Weight

_EMBEDDING = "model.embed_tokens"


class NextNHead(ModuleHead):
    """See ``ModuleHead``; the next row's state is the one before the norm."""

    zeroes_first, feeds_normed = True, False


class NextNCheckpoint(ModuleCheckpoint):
    """The module in the target's directory.

    Raises:
        CheckpointError: no config, or a checkpoint without the module's weights.
        UnsupportedError: an architecture without a NextN module, or one of several layers.
    """

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        super().__init__(directory, load_format=load_format)
        self._family = _family_of(self.config, directory)
        self.prefix = nextn_prefix(self.config)
        settings = Settings(self.config.extra, str(directory))
        claimed = settings.get("num_nextn_predict_layers", 1)
        self._require_module("NextN", claimed, f"{self.prefix}eh_proj")

    def caches(self, dtype: torch.dtype) -> tuple[LayerCache, ...]:
        """See ``HeadCheckpoint``; the one of the target's last layer."""
        return self._family.caches_of(self.config, dtype, str(self._directory))[-1:]

    def _build(self, reader: HeadReader) -> NextNHead:
        config, prefix, weights = self.config, self.prefix, reader.weights
        hidden, family = config.hidden_size, self._family

        def norm(name: str) -> RMSNorm:
            return load_norm(config, weights, f"{prefix}{name}")

        return NextNHead(
            kernels=weights.kernels,
            embedding=self._load_embedding(reader),
            module=Module(
                embedding_norm=norm("enorm"),
                hidden_norm=norm("hnorm"),
                fc=weights.linear(2 * hidden, Part(f"{prefix}eh_proj", hidden)),
                layer=DecoderLayer(
                    norm("input_layernorm"),
                    family.load_module_attention(
                        config, weights, f"{prefix}self_attn", reader.max_positions
                    ),
                    norm("post_attention_layernorm"),
                    family.load_layer_mlp(config, weights, f"{prefix}mlp", config.num_layers),
                ),
                norm=norm("shared_head.norm"),
            ),
            lm_head=self._load_head(reader),
            caches=self._own_caches(reader),
            parallel=weights.parallel,
            token_ids=reader.token_ids,
        )

    def _own_caches(self, reader: HeadReader) -> tuple[LayerCache, ...]:
        """This rank's, with the module's scales of float8 KV where it has some."""
        weights, attention = reader.weights, f"{self.prefix}self_attn"
        strategy = kv_strategy(self.config.extra, str(self._directory))
        (whole,) = self.caches(weights.dtype)
        if strategy is not None and has_scales(weights, attention):
            return (with_scales(whole, weights, attention, strategy),)
        return reader.caches((whole,))

    def _load_embedding(self, reader: HeadReader) -> UnquantizedWeight:
        own, config = f"{self.prefix}embed_tokens", self.config
        if not self._has_own(reader.weights, own, _EMBEDDING):
            return reader.shared.embedding
        return reader.weights.packed(config.hidden_size, Part(f"{own}.weight", config.vocab_size))

    def _load_head(self, reader: HeadReader) -> Weight:
        own, config = f"{self.prefix}shared_head.head", self.config
        of_target = _EMBEDDING if config.tie_word_embeddings else HEAD.removesuffix(".weight")
        if not self._has_own(reader.weights, own, of_target):
            return reader.target_lm_head()
        return reader.lm_head(config.vocab_size, config.hidden_size, name=own)

    def _has_own(self, reader: WeightReader, own: str, target: str) -> bool:
        """Whether the module's checkpoint holds a weight that is no copy of the target's."""
        if not _kinds(reader.source, own):
            return False
        if not _are_equal(self._open(), own, target):
            return True
        reader.pass_over(own)
        return False


def _family_of(config: ModelConfig, directory: Path) -> type[NextNTarget]:
    """The target's class; another architecture is refused."""
    family = ARCHITECTURES.get(config.architecture)
    if family is None or not issubclass(family, NextNTarget):
        raise UnsupportedError(
            f"{directory}: {config.architecture} has no NextN module", f"use {ANOTHER_METHOD}"
        )
    return family


def _are_equal(source: TensorSource, one: str, other: str) -> bool:
    """Whether two modules of a checkpoint hold the same tensors to the bit."""
    kinds = _kinds(source, one)
    return kinds == _kinds(source, other) and all(
        _are_same(source, f"{one}.{kind}", f"{other}.{kind}") for kind in kinds
    )


def _kinds(source: TensorSource, module: str) -> set[str]:
    """Names of a module's tensors, without its own."""
    prefix = f"{module}."
    return {name.removeprefix(prefix) for name in source.names() if name.startswith(prefix)}


def _are_same(source: TensorSource, one: str, other: str) -> bool:
    forms = [(source.shape(name), source.stored_dtype(name)) for name in (one, other)]
    if forms[0] != forms[1]:
        return False
    pairs = zip(source.stored_chunks(one), source.stored_chunks(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
