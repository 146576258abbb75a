"""The EAGLE-3 head as a trainable network, and its training-time test.

Names of parameters are those of the ``speculators`` layout. The arithmetic is that of
``models/eagle3.py``, which runs what is trained here.

Training-time test (Li et al., arXiv:2503.01840, section 3.2; SafeAILab/EAGLE
``eagle/traineagle3/cnets.py``; vllm-project/speculators ``models/eagle3/core.py``): the head
is unrolled over every position at once. At step s, row r stands for position r + s. It takes
the token at r + s + 1 and, instead of the target's states there, what row r itself put out at
step s - 1. Its keys are those that drafting would find at that place: of rows 0 .. r at step
0, made from the target's states, and of row r alone at steps 1 .. s.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from sametoken.kernels.interface import RotaryTable
from sametoken.models.base import ModelConfig
from sametoken.train.head_objective import HeadNetwork
from sametoken.train.layers import Attention, GatedMLP, Norm, UnrolledKV, rows_of


class Eagle3Layer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, config: ModelConfig, *, norm_before_residual: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = Norm(hidden, eps)
        self.hidden_norm = Norm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = GatedMLP(hidden, config.intermediate_size)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, kv: UnrolledKV
    ) -> Tensor:
        """Two [B, L, hidden] to the residual stream that the next step takes."""
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        residual = (normed if self.norm_before_residual else hidden) + self.self_attn.unrolled(
            x, cos, sin, kv
        )
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


class Eagle3Network(HeadNetwork):
    """A trainable head.

    Args:
        config: sizes of the layer, ``vocab_size`` that of the target.
        draft_vocab_size: tokens it can propose.
        num_aux: the target's states that it reads.
        norm_before_residual: as in ``Eagle3Config``.
        rotary: cos and sin of every position, drafts included.

    Attributes:
        state_scale: [num_aux * hidden], what the target's states are multiplied by, so that
            every channel has the same size; ``export_tensors`` folds it into ``fc``.
    """

    state_scale: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        draft_vocab_size: int,
        num_aux: int,
        norm_before_residual: bool,
        rotary: RotaryTable,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(num_aux * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(
            [Eagle3Layer(config, norm_before_residual=norm_before_residual)]
        )
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)
        self.register_buffer("state_scale", torch.ones(num_aux * hidden))
        self._rotary = rotary

    def unroll(
        self, embedding: Tensor, token_ids: Tensor, auxiliary: Tensor, num_steps: int
    ) -> Iterator[Tensor]:
        """See ``HeadNetwork``; ``auxiliary`` is [B, L, num_aux * hidden]."""
        (layer,) = self.layers
        hidden, kv = self.fc(auxiliary.float() * self.state_scale), UnrolledKV()
        num_rows = token_ids.shape[1]
        for step in range(num_steps):
            following = functional.pad(token_ids[:, 1 + step :], (0, min(1 + step, num_rows)))
            cos, sin = rows_of(self._rotary, step, num_rows)
            hidden = layer(embedding[following].to(hidden.dtype), hidden, cos, sin, kv)
            yield self.norm(hidden)

    @property
    def draft_head(self) -> Tensor:
        """See ``HeadNetwork``."""
        return self.lm_head.weight

    def export_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights under the names of ``speculators``, on the host."""
        tensors = {name: value.detach().clone() for name, value in self.named_parameters()}
        tensors["fc.weight"] = tensors["fc.weight"] * self.state_scale
        return {name: value.to("cpu", dtype) for name, value in tensors.items()}

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> None:
        """Take exported weights back, so that what is measured is what was written."""
        self.state_scale.fill_(1.0)
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])
