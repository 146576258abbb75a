"""Attention over the steps of an unrolled draft head, and the tokens that each step reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

UNROLLED = "sametoken_unrolled"


class DraftModule(nn.Module, ABC):
    """What drafts from the target's states: a multi-token-prediction (MTP) module, or a head."""

    @abstractmethod
    def unroll(
        self, embedding: Tensor, token_ids: Tensor, states: Tensor, k: int
    ) -> Iterator[Tensor]:
        """What logits are made from, [B, L, hidden], of each draft in turn.

        Args:
            embedding: [V, hidden], the target's.
            token_ids: [B, L] int64.
            states: [B, L, ...], those of the target's that it reads; for a module [B, L, hidden],
                after the final norm.
            k: drafts in a row. At step s, row r stands for position r + s and takes the token at
                r + s + 1.
        """
        ...


@dataclass(slots=True)
class UnrolledKV:
    """Keys and values of every unrolled step so far, [B, kv_heads, L, head_dim] each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def unrolled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    unrolled_kv: UnrolledKV,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over the steps of an unrolled head, as transformers' modules call it.

    The step's keys and values are added to ``unrolled_kv``. Row r reads those of rows 0 .. r at
    step 0, and of row r alone at later steps.

    Returns:
        [B, L, heads, head_dim], and no weights.
    """
    # Rotation leaves fp32 where autocast gave bf16 projections.
    query, key = query.to(value.dtype) * scaling, key.to(value.dtype)
    unrolled_kv.keys.append(key)
    unrolled_kv.values.append(value)
    keys, values = (
        [x[:, :, None] for x in part] for part in (unrolled_kv.keys, unrolled_kv.values)
    )
    q = torch.unflatten(query, 1, (key.shape[1], -1))
    num_rows = q.shape[-2]
    future = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(future, -torch.inf)
    own = [(q * k).sum(-1, dtype=torch.float32) for k in keys[1:]]
    if own:
        scores = torch.cat((scores, torch.stack(own, dim=-1)), dim=-1)
    weights = scores.softmax(-1).to(q.dtype)
    attended = weights[..., :num_rows] @ values[0]
    for step, v in enumerate(values[1:]):
        attended = attended + weights[..., num_rows + step, None] * v
    return attended.flatten(1, 2).transpose(1, 2), None


AttentionInterface.register(UNROLLED, unrolled_attention)


def shifted(token_ids: Tensor, count: int) -> Tensor:
    """[B, L]: the tokens ``count`` positions later, zeros behind the last."""
    return functional.pad(token_ids[:, count:], (0, min(count, token_ids.shape[1])))
