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
used in their place; other ones are the module's own. transformers ignores all of it.

Config key: ``num_nextn_predict_layers``; without it there is one layer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import DERIVED_TENSORS, HEAD, DecoderLayer
from sametoken.models.heads.base import (
    HeadStates,
    SharedWeights,
    load_lm_head,
    load_norm,
)
from sametoken.models.heads.mtp_form import ANOTHER_METHOD, Module, ModuleCheckpoint, ModuleHead
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import Part, TensorSource, WeightReader
from sametoken.models.nextn_target import NextNTarget, nextn_prefix
from sametoken.models.registry import ARCHITECTURES
from sametoken.ops.backend import AttentionRows
from sametoken.ops.weight import UnquantizedWeight

_EMBEDDING, _HEAD = "embed_tokens.weight", "shared_head.head.weight"


class NextNHead(ModuleHead):
    """See ``ModuleHead``; the next row's state is the one before the norm."""

    def _inputs(self, token_ids: Tensor, hidden: Tensor, rows: AttentionRows) -> Tensor:
        """As ``ModuleHead._inputs``, with the embedding zeroed at position 0."""
        both = super()._inputs(token_ids, hidden, rows)
        # A norm of zeros is zeros, so this is the norm of a zeroed embedding.
        both[:, : hidden.shape[1]].masked_fill_((rows.positions == 0)[:, None], 0.0)
        return both

    def _states(self, normed: Tensor, residual: Tensor) -> HeadStates:
        return HeadStates(normed, residual)


class NextNCheckpoint(ModuleCheckpoint[NextNHead]):
    """The module in the target's directory.

    Raises:
        CheckpointError: no config, or a checkpoint without the module's weights.
        UnsupportedError: an architecture without a NextN module, or one of several layers.
    """

    unused_tensors = (*DERIVED_TENSORS, _EMBEDDING, _HEAD)

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        super().__init__(directory, load_format=load_format)
        self._family = _family_of(self.config, directory)
        self.prefix = nextn_prefix(self.config)
        settings = Settings(self.config.extra, str(directory))
        claimed = settings.get("num_nextn_predict_layers", 1)
        self._require_module("NextN", self.prefix, claimed, f"{self.prefix}eh_proj")

    def _build(
        self,
        reader: WeightReader,
        shared: SharedWeights,
        max_positions: int,
        token_ids: Tensor | None,
    ) -> NextNHead:
        config, prefix = self.config, self.prefix
        hidden = config.hidden_size
        whole = self._own(reader, _HEAD) or shared.whole_head()
        caches = self._family.caches_of(config, reader.dtype, reader.source.location)
        return NextNHead(
            kernels=reader.kernels,
            embedding=self._own(reader, _EMBEDDING) or shared.embedding,
            module=Module(
                embedding_norm=load_norm(reader, f"{prefix}enorm", config),
                hidden_norm=load_norm(reader, f"{prefix}hnorm", config),
                fc=reader.linear(2 * hidden, Part(f"{prefix}eh_proj", hidden)),
                layer=self._load_layer(reader, max_positions),
                norm=load_norm(reader, f"{prefix}shared_head.norm", config),
            ),
            lm_head=load_lm_head(reader, whole, token_ids),
            caches=caches[-1:],
            token_ids=token_ids,
        )

    def _load_layer(self, reader: WeightReader, max_positions: int) -> DecoderLayer:
        config, prefix = self.config, self.prefix
        attention = f"{prefix}self_attn"
        return DecoderLayer(
            load_norm(reader, f"{prefix}input_layernorm", config),
            self._family.load_module_attention(config, reader, attention, max_positions),
            load_norm(reader, f"{prefix}post_attention_layernorm", config),
            self._family.load_layer_mlp(config, reader, f"{prefix}mlp", config.num_layers),
        )

    def _own(self, reader: WeightReader, name: str) -> UnquantizedWeight | None:
        """A weight [V, hidden] of the module; None if it has none, or a copy of the target's."""
        own, config = f"{self.prefix}{name}", self.config
        if own not in reader:
            return None
        shared = "model.embed_tokens.weight"
        if name == _HEAD and not config.tie_word_embeddings:
            shared = HEAD
        if _are_equal(self._open(), own, shared):
            return None
        return reader.packed(config.hidden_size, Part(own, config.vocab_size))


def _family_of(config: ModelConfig, directory: Path) -> type[NextNTarget]:
    """The target's class; another architecture is refused."""
    family = ARCHITECTURES.get(config.architecture)
    if family is None or not issubclass(family, NextNTarget):
        raise UnsupportedError(
            f"{directory}: {config.architecture} has no NextN module", f"use {ANOTHER_METHOD}"
        )
    return family


def _are_equal(source: TensorSource, name: str, other: str) -> bool:
    """Whether two tensors of a checkpoint exist and are the same to the bit."""
    if other not in source.names() or source.shape(name) != source.shape(other):
        return False
    pairs = zip(source.chunks(name), source.chunks(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
