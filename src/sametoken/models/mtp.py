"""The multi-token-prediction module (MTP, NextN) of Qwen3-Next and Qwen3.5.

Row p holds the token at p + 1 and the target's last hidden state at p, and predicts the
token at p + 2. Facts taken from vLLM (``vllm/model_executor/models/qwen3_next_mtp.py``,
``qwen3_5_mtp.py``) and SGLang (``python/sglang/srt/models/qwen3_5_mtp.py``):

- ``fc`` maps ``[pre_fc_norm_embedding(embedding) | pre_fc_norm_hidden(hidden)]``, 2h wide,
  to h, without a bias, in drafted rows too.
- The target's state is the one after its final norm. The next row takes the module's own
  state after ``norm``, which logits are made from as well. Acceptance falls with states
  from before those norms (measured in ggml-org/llama.cpp#24025 and ROCm/ATOM#1764).
- One layer of gated full attention follows, with an MLP as the target's layer 0 has it.
  One trained layer serves every further draft.
- Norm weights are stored as their difference from 1, as the target's are.
- Embedding and lm_head are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.kernels.cache_types import PagedKV
from sametoken.kernels.interface import AttentionRows, Kernels
from sametoken.kernels.weight import UnquantizedWeight, Weight
from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm
from sametoken.models.base import HiddenStates
from sametoken.models.decoder import DecoderLayer
from sametoken.models.eagle import HeadStates
from sametoken.state.caches import ModelCache


@dataclass(frozen=True, slots=True)
class MTPHead:
    """The module's weights and its forward pass, as an ``EagleHead``.

    Attributes:
        embedding: [V, hidden], the target's own.
        lm_head: [V', hidden], likewise; V' is V, or as many as ``token_ids`` has.
        caches: KV of the one layer.
        token_ids: [V'] int64, ascending, all that it proposes; None: every token.
    """

    kernels: Kernels
    embedding: UnquantizedWeight
    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    fc: Linear
    layer: DecoderLayer
    norm: RMSNorm
    lm_head: Weight
    caches: tuple[PagedKV, ...]
    token_ids: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices between embedding and lm_head."""
        return self.fc.nbytes + self.layer.nbytes

    def target_states(self, hidden: HiddenStates, rows: Tensor | None) -> Tensor:
        """The target's states after its final norm; ``forward`` only reads them."""
        return self.kernels.take_rows(hidden.last, rows)

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
            token_ids, self.embedding, self.embedding_norm, hidden, self.hidden_norm
        )
        residual = self.fc(both)
        layer = self.layer
        attended = layer.attention(layer.input_norm(residual), rows, cache.kv(0), kept)
        x, residual = layer.post_attention_norm.add(
            attended, self.kernels.take_rows(residual, kept)
        )
        last, _ = self.norm.add(layer.mlp(x), residual)
        return HeadStates(last, last)

    def compute_logits(self, last: Tensor) -> Tensor:
        """[R, hidden] to [R, V'] fp32."""
        return self.lm_head.matmul(last, out_dtype=torch.float32)
