"""Medusa heads (Cai et al., arXiv:2401.10774).

Head i predicts, from the target's state that gave the newest token, the token i + 1 places after
it; it knows neither that token nor other drafts. From the reference (FasterDecoding/Medusa
``medusa/model/medusa_model.py``) and vLLM (``vllm/model_executor/models/medusa.py``):

- The target's state is the one after its final norm.
- A head is one or more blocks ``x + silu(linear(x))``, then an ``lm_head`` of its own, or with
  ``original_lm_head`` one that all heads share: a copy in the checkpoint, else the target's.
- Drafts are one chain of each head's choices; trees of several are not made, as in vLLM.

Two checkpoint layouts are published, both with or without a prefix ``medusa_head.`` or
``medusa_heads.``:

- FasterDecoding: config.json has ``medusa_num_heads`` and ``medusa_num_layers`` and no sizes, which
  are the target's. Tensors are ``<head>.<layer>.linear.{weight,bias}`` and ``<head>.<num_layers>``
  for the lm_head; a ``medusa_lm_head.pt`` has to be converted.
- vLLM's (``MedusaModel``): ``num_heads``, ``num_hidden_layers``, sizes; tensors are
  ``blocks.<head>.layers.<layer>.{weight,bias}`` and ``lm_heads.<head>.weight`` or
  ``lm_head.weight``. With a ``truncated_vocab_size`` below ``vocab_size``, ``token_map`` lists the
  only ids to propose; lm_heads have a row for each, or for all tokens.

Blocks have a bias if the config says ``medusa_fc_bias`` or the tensors include one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from sametoken.layers.linear import Linear
from sametoken.models.base import ModelConfig
from sametoken.models.heads.base import HeadStates, refuse, require_sizes
from sametoken.models.heads.own_tokens import ascending, read_own_tokens
from sametoken.models.heads.reader import HeadReader
from sametoken.models.heads.state_head import StateHead, StateHeadCheckpoint
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.settings import MAX_LAYERS
from sametoken.models.load.weights import Part
from sametoken.ops.weight import Weight

_TOKEN_MAP = "token_map"
_RENAMED = (
    (re.compile(r"medusa_heads?\.(.+)"), r"\1"),
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"blocks.\1.layers.\2.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"lm_heads.\1.weight"),
    (re.compile(_TOKEN_MAP), ""),
)


@dataclass(frozen=True, slots=True)
class MedusaHead(StateHead):
    """The heads' weights; ``linears`` are the blocks."""

    def forward(self, index: int, token_ids: Tensor, states: Tensor) -> HeadStates:
        """See ``StateHead.forward``; all drafts have the target's state."""
        x = states
        for linear in self.linears[index]:
            x = x + silu(linear(x))
        return HeadStates(x, states)


class MedusaCheckpoint(StateHeadCheckpoint):
    """A directory with Medusa heads; a dummy's token map is of the first ids."""

    architecture, method = "MedusaModel", "medusa"

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        super().__init__(directory, load_format=load_format)
        settings = self.settings
        refuse(settings.location, (settings.get("logit_scale", 1) != 1, "a logit_scale"))
        vocab_size = settings.get("vocab_size")
        if settings.get("truncated_vocab_size", vocab_size) != vocab_size:
            self.num_own_tokens = settings.integer("truncated_vocab_size")
        is_of_vllm = settings.get("num_hidden_layers") is not None
        key = "num_hidden_layers" if is_of_vllm else "medusa_num_layers"
        self._num_layers = settings.integer(key, 1, MAX_LAYERS)
        self._has_biases = settings.switch("medusa_fc_bias")
        self._has_one_lm_head = settings.switch("original_lm_head")

    def require_fit(self, target: ModelConfig) -> None:
        """Refuse a target of another vocabulary or hidden size."""
        settings, vocab_size = self.settings, target.vocab_size
        hidden_size = settings.integer("hidden_size", target.hidden_size)
        require_sizes(settings.integer("vocab_size", vocab_size), hidden_size, target)
        settings.integer("truncated_vocab_size", vocab_size, most=vocab_size)

    def _renamed(self, name: str) -> str:
        for form, renamed in _RENAMED:
            if match := form.fullmatch(name):
                name = match.expand(renamed)
        return name

    def _build(self, reader: HeadReader) -> MedusaHead:
        places = None
        if self.num_own_tokens is not None:
            own_ids, places = ascending(self._own_tokens(reader, self.num_own_tokens))
            reader = replace(reader, token_ids=own_ids.to(reader.weights.device))
        if self._has_one_lm_head:
            lm_heads = self._by_draft(lambda i: self._shared_lm_head(reader, places), lambda i: 0)
        else:
            lm_heads = self._by_draft(lambda i: self._lm_head(reader, f"lm_heads.{i}", places))
        head = MedusaHead(
            kernels=reader.weights.kernels,
            linears=self._by_draft(lambda i: self._blocks(reader, i)),
            lm_heads=lm_heads,
            token_ids=reader.token_ids,
        )
        self._pass_over(reader, "blocks", self.num_drafts)
        self._pass_over(reader, "lm_heads", 0 if self._has_one_lm_head else self.num_drafts)
        return head

    def _blocks(self, reader: HeadReader, index: int) -> tuple[Linear, ...]:
        weights = reader.weights
        hidden, linears = reader.shared.embedding.in_features, list[Linear]()
        for layer in range(self._num_layers):
            name = f"blocks.{index}.layers.{layer}"
            bias = self._has_biases or f"{name}.bias" in weights
            linears.append(weights.linear(hidden, Part(name, hidden), bias=bias))
        return tuple(linears)

    def _shared_lm_head(self, reader: HeadReader, places: Tensor | None) -> Weight:
        for name in ("lm_head", "lm_heads.0"):
            if f"{name}.weight" in reader.weights:
                return self._lm_head(reader, name, places)
        return reader.target_lm_head()

    def _lm_head(self, reader: HeadReader, name: str, places: Tensor | None) -> Weight:
        """The lm_head of that name, over the tokens that may be proposed.

        ``places`` are those of the rows of a token map of its own; a file may have all rows too.
        """
        weights, table, stored = reader.weights, reader.shared.embedding, f"{name}.weight"
        rows, hidden = table.out_features, table.in_features
        is_whole = stored in weights and weights.source.shape(stored)[:1] == (rows,)
        if places is None or is_whole:
            return reader.made_of(weights.packed(hidden, Part(stored, rows)))
        cut = weights.packed(hidden, Part(stored, places.shape[0], places))
        return replace(reader, token_ids=None).made_of(cut)

    def _own_tokens(self, reader: HeadReader, count: int) -> Tensor:
        """[count] ids of its own map, in the file's order."""
        if self._is_dummy:
            return torch.arange(count)
        source, vocab_size = open_weights(self._directory), reader.shared.embedding.out_features
        name = next((one for one in source.names() if one.endswith(_TOKEN_MAP)), _TOKEN_MAP)
        return read_own_tokens(source, name, count, vocab_size)
