"""The EAGLE-3 draft head (Li et al., arXiv:2503.01840): one decoder layer over target states.

Row p holds the token at p + 1 and the target's hidden states at p, and predicts the token
at p + 2. Facts taken from the reference (SafeAILab/EAGLE ``eagle/model/cnets.py``), from
vLLM (``vllm/model_executor/models/llama_eagle3.py``) and from the library that trains most
published heads (vllm-project/speculators ``models/eagle3/model_definitions.py``):

- ``fc`` maps the concatenated auxiliary states [T, 3h] to h, once; drafted rows take the
  head's own state instead and skip ``fc``.
- Attention reads ``[input_layernorm(embedding) | hidden_norm(hidden)]``, 2h wide. The
  residual is ``hidden`` before its norm, or after it under ``norm_before_residual``.
- The state fed to the next row is the residual stream before the final norm; under
  ``norm_output`` (EAGLE 3.1) it is the one after it.
- ``norm_before_fc`` norms the concatenation as a whole, ``fc_norm`` each part by itself.
- ``lm_head`` covers the draft vocabulary; draft id d is target id ``d + d2t[d]``.
- RoPE positions of rows need only be consistent: vLLM gives row p position p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.kernels.cache_types import PagedKV
from sametoken.kernels.interface import AttentionRows, Kernels
from sametoken.kernels.weight import UnquantizedWeight, Weight
from sametoken.layers.attention import Attention
from sametoken.layers.linear import Linear
from sametoken.layers.mlp import GatedMLP
from sametoken.layers.norm import RMSNorm
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.eagle import HeadStates
from sametoken.state.caches import ModelCache


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """A head's architecture.

    Attributes:
        layer: sizes of its decoder layer; ``layer.vocab_size`` is the target's vocabulary.
        draft_vocab_size: tokens the head can propose.
        target_hidden_size: width of one auxiliary state.
        aux_layer_ids: decoder layers of the target whose input it reads, or None for the
            default; the number of target layers stands for the input of the final norm.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @property
    def num_aux(self) -> int:
        """How many of the target's states are concatenated."""
        return 3 if self.aux_layer_ids is None else len(self.aux_layer_ids)

    @property
    def has_token_map(self) -> bool:
        """Whether it proposes fewer tokens than the target has, by ``d2t``."""
        return self.draft_vocab_size != self.layer.vocab_size


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """The head's weights and its forward pass, as an ``EagleHead``.

    Attributes:
        embedding: [V, hidden], the target's own unless the head has one.
        aux_norms: one over the whole concatenation, one per part, or none.
        lm_head: [draft vocabulary, hidden], rows in the order of ``token_ids``.
        token_ids: [draft vocabulary] int64, ascending ids of the target's vocabulary, or None
            where both are one.
    """

    config: Eagle3Config
    kernels: Kernels
    embedding: UnquantizedWeight
    aux_norms: tuple[RMSNorm, ...]
    fc: Linear
    input_layernorm: RMSNorm
    hidden_norm: RMSNorm
    attention: Attention
    post_attention_layernorm: RMSNorm
    mlp: GatedMLP
    norm: RMSNorm
    lm_head: Weight
    token_ids: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices between embedding and lm_head."""
        return self.fc.nbytes + self.attention.nbytes + self.mlp.nbytes

    @property
    def caches(self) -> tuple[PagedKV, ...]:
        """KV of the one layer, in the dtype of its weights."""
        shape, dtype = self.attention.shape, self.norm.weight.dtype
        return (PagedKV(shape.num_kv_heads, shape.head_dim, shape.head_dim, dtype),)

    def target_states(self, hidden: HiddenStates, rows: Tensor | None) -> Tensor:
        """The target's auxiliary states, combined."""
        return self.combine(self.kernels.take_rows(hidden.auxiliary, rows))

    def combine(self, auxiliary: Tensor) -> Tensor:
        """[T, num_aux * target_hidden] of the target to [T, hidden], in memory of its own."""
        if self.aux_norms:
            parts = auxiliary.chunk(len(self.aux_norms), dim=1)
            pairs = zip(self.aux_norms, parts, strict=True)
            auxiliary = torch.cat([norm(part.contiguous()) for norm, part in pairs], dim=1)
        return self.fc(auxiliary)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: Tensor | None = None,
    ) -> HeadStates:
        """Run rows over paged KV, writing theirs; arguments as in ``EagleHead``."""
        both = self.kernels.embed_beside(
            token_ids, self.embedding, self.input_layernorm, hidden, self.hidden_norm
        )
        attended = self.attention(both, rows, cache.kv(0), kept)
        residual = hidden
        if self.config.norm_before_residual:
            residual = both[:, hidden.shape[1] :].contiguous()
        residual = self.kernels.take_rows(residual, kept)
        x, residual = self.post_attention_layernorm.add(attended, residual)
        last, residual = self.norm.add(self.mlp(x), residual)
        return HeadStates(last, last if self.config.norm_output else residual)

    def compute_logits(self, last: Tensor) -> Tensor:
        """[R, hidden] to [R, draft vocabulary] fp32."""
        return self.lm_head.matmul(last, out_dtype=torch.float32)
