"""Log-probabilities, ranks and best candidates of positions."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from sametoken.verification.base import TokenLogprobs

_ID_MASK = 0xFFFFFFFF


def score_tokens(
    logits: Tensor, chosen: Tensor, owner: Tensor, num_top: Tensor, width: int
) -> TokenLogprobs:
    """Score chosen tokens against raw logits, as vLLM's ``raw_logprobs`` does.

    Equal logits rank by token id, lowest first, in ranks and among the best alike.

    Args:
        logits: [R, V] fp32 as the model computed them.
        chosen: [R] int64, the tokens to score.
        owner: [R] int64, ascending.
        num_top: [R] int64, best candidates asked for, 0..width.
        width: N of the result, cut to V.
    """
    width = min(width, logits.shape[1])
    logprobs = logits.log_softmax(dim=-1)
    order = _order_keys(logits)
    column = chosen[:, None]
    top_ids = _ID_MASK - (order.topk(width, dim=-1).values & _ID_MASK)
    return TokenLogprobs(
        owner=owner,
        chosen_ids=chosen,
        chosen_logprobs=logprobs.gather(1, column).squeeze(1),
        chosen_ranks=(order > order.gather(1, column)).sum(dim=-1) + 1,
        top_ids=top_ids,
        top_logprobs=logprobs.gather(1, top_ids),
        num_top=num_top.clamp(max=width),
    )


def concatenate(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """Positions of several scorings of equal width, in order."""
    names = [f.name for f in fields(TokenLogprobs)]
    return TokenLogprobs(*(torch.cat([getattr(p, name) for p in parts]) for name in names))


def _order_keys(logits: Tensor) -> Tensor:
    """[R, V] int64, distinct within a row: by logit, then by lowest token id.

    ``topk`` breaks ties as it likes, which would let the answer depend on its width.
    """
    bits = (logits + 0.0).view(torch.int32)
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ascending << 32) | (_ID_MASK - ids)
