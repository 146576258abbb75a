"""The first EAGLE draft head (Li et al., arXiv:2401.15077), which EAGLE-2 uses unchanged.

Row p holds the token at p + 1 and the target's last hidden state at p, and predicts the
token at p + 2. Facts taken from the reference (SafeAILab/EAGLE ``eagle/model/cnets1.py``)
and from vLLM (``vllm/model_executor/models/llama_eagle.py``):

- ``fc`` maps ``[embedding | hidden]``, 2h wide, to h, in drafted rows too. It has a bias
  or none: published heads differ, and so do the names of the setting.
- The target's state is the one after its final norm, from which it makes its logits
  (``ea_model.py`` takes ``base_model.model(...)[0]``, ``ge_data`` ``hidden_states[-1]``).
- Llama layers follow, of which the first has no ``input_layernorm``. There is no final
  norm: the residual stream is what logits are made from and what the next row takes.
- Logits come from the target's own ``lm_head``.
- RoPE positions of rows need only be consistent: row p gets position p.
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
class Eagle1Config:
    """A head's architecture.

    Attributes:
        layer: sizes of its decoder layers and how many there are; hidden size and
            vocabulary are the target's.
        fc_bias: whether ``fc`` must have a bias; it may have one in any case.
    """

    layer: ModelConfig
    fc_bias: bool


@dataclass(frozen=True, slots=True)
class Eagle1Layer:
    """One decoder layer; ``input_norm`` is None in the first."""

    input_norm: RMSNorm | None
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: GatedMLP


@dataclass(frozen=True, slots=True)
class Eagle1Head:
    """The head's weights and its forward pass, as an ``EagleHead``.

    Attributes:
        embedding: [V, hidden], the target's own unless the head has one.
        lm_head: [V', hidden], likewise; V' is V, or as many as ``token_ids`` has.
        token_ids: [V'] int64, ascending, all that it proposes; None: every token.
    """

    kernels: Kernels
    embedding: UnquantizedWeight
    fc: Linear
    layers: tuple[Eagle1Layer, ...]
    lm_head: Weight
    token_ids: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices between embedding and lm_head."""
        layers = (layer.attention.nbytes + layer.mlp.nbytes for layer in self.layers)
        return self.fc.nbytes + sum(layers)

    @property
    def caches(self) -> tuple[PagedKV, ...]:
        """KV of every layer, in the dtype of its weights."""
        first = self.layers[0]
        shape, dtype = first.attention.shape, first.post_attention_norm.weight.dtype
        cache = PagedKV(shape.num_kv_heads, shape.head_dim, shape.head_dim, dtype)
        return (cache,) * len(self.layers)

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
        embedded = self.embedding.rows(token_ids)
        residual = self.fc(torch.cat((embedded, hidden), dim=1))
        for index, layer in enumerate(self.layers):
            x = residual if layer.input_norm is None else layer.input_norm(residual)
            # A row's output in a layer is the next one's KV.
            wanted = kept if index + 1 == len(self.layers) else None
            attended = layer.attention(x, rows, cache.kv(index), wanted)
            x, residual = layer.post_attention_norm.add(
                attended, self.kernels.take_rows(residual, wanted)
            )
            residual = residual + layer.mlp(x)
        return HeadStates(residual, residual)

    def compute_logits(self, last: Tensor) -> Tensor:
        """[R, hidden] to [R, V'] fp32."""
        return self.lm_head.matmul(last, out_dtype=torch.float32)
