"""The model interface: architecture, forward pass, logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sametoken.ops.backend import AttentionRows, KeptRows
from sametoken.ops.cache_types import LayerCache
from sametoken.state.caches import ModelCache

#: The key of ``extra`` of checkpoints that do not tell which factors their weights hold.
HOLDS_FACTORS = "weights_hold_factors"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint's architecture, read once from its config.json or GGUF header.

    Attributes:
        architecture: the Hugging Face class name, e.g. ``LlamaForCausalLM``.
        rope: the rotary settings in transformers' form: ``rope_type``, ``rope_theta`` and the
            type's parameters.
        local_rope: those of layers with a sliding window, where they have their own.
        eos_token_ids: from generation_config.json if present, else config.json.
        extra: the whole config as a dict, for architecture-specific keys.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any]
    tie_word_embeddings: bool
    attention_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype
    extra: dict[str, Any]
    local_rope: dict[str, Any] | None = None

    @property
    def holds_factors(self) -> bool:
        """Whether weights were multiplied by the model's factors: no others fit beside them."""
        return bool(self.extra.get(HOLDS_FACTORS))

    @property
    def also_sees(self) -> bool:
        """Whether the checkpoint has an encoder of images too, which is not loaded."""
        return self.architecture.endswith("ForConditionalGeneration")


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of a forward pass, for logits and drafters.

    Attributes:
        last: [T, hidden], after the final norm; [R, hidden] if R rows were kept.
        auxiliary: [T, num_aux * hidden] in the dtype of ``last``: the concatenated residual
            stream at the auxiliary layers (EAGLE-3); [T, 0] without any.
    """

    last: Tensor
    auxiliary: Tensor


class CausalLM(Protocol):
    """A decoder whose forward pass runs rows of any requests over its layers' caches.

    Attributes:
        config: the architecture.
        caches: the cache declaration of each layer, on this rank.
    """

    config: ModelConfig
    caches: tuple[LayerCache, ...]

    def forward(
        self,
        token_ids: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: KeptRows | None = None,
    ) -> HiddenStates:
        """[T] ids to hidden states; reads and writes the cache of the rows' slots.

        The last layer runs other rows than ``kept`` only for its cache; None: it runs all.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden] (after the final norm) to [L, V] fp32."""
        ...

    def compute_rank_logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden] to this rank's columns of the logits, [L, ceil(V / size)] fp32."""
        ...


class StandIn:
    """Stands in a target's place as a ``CausalLM``, and runs each of its passes within a block.

    Args:
        target: the model, or what already stands in its place.
    """

    def __init__(self, target: CausalLM) -> None:
        self.config, self.caches, self._target = target.config, target.caches, target

    def around(self, rows: AttentionRows) -> AbstractContextManager[None]:
        """The block for a pass of these rows; by default an empty one."""
        return nullcontext()

    def forward(
        self,
        token_ids: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: KeptRows | None = None,
    ) -> HiddenStates:
        """See ``CausalLM.forward``; every layer runs all rows."""
        assert kept is None
        with self.around(rows):
            return self._target.forward(token_ids, rows, cache)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalLM.compute_logits``."""
        return self._target.compute_logits(hidden)

    def compute_rank_logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalLM.compute_rank_logits``."""
        return self._target.compute_rank_logits(hidden)
