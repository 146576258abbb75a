"""Log-probabilities, ranks and best candidates of positions.

Log-probabilities between the device and the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sametoken.state.upload import upload

_ID_MASK = 0xFFFFFFFF
# Bounds the logits held at once while a prompt is scored: 64 rows of 150k are 38 MB.
_ROWS_AT_A_TIME = 64
# Of output the logits are there; scoring 256 rows of 150k takes another 620 MB.
_ROWS_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The rows of a step that are scored. R rows, perhaps none.

    Attributes:
        index: [R] int64, which logits rows (or flat rows) they are, ascending.
        owner: [R] int64, the plan row of each.
        num_top: [R] int64, best candidates asked for, 0..width.
        width: the most that any of them asks for.
    """

    index: Tensor
    owner: Tensor
    num_top: Tensor
    width: int

    @classmethod
    def of(
        cls, asked: Mapping[int, int], windows: Iterable[tuple[int, int, int]], device: torch.device
    ) -> ScoredRows:
        """From what the host knows alone: nothing is read of the device.

        Args:
            asked: best candidates asked for, by slot, for the slots that asked.
            windows: slot, first row and number of rows of each plan row. Rows that turn out
                dead are scored like others; the host drops what was not emitted.
            device: where the rows' logits are.
        """
        columns = [
            (row, owner, asked[slot])
            for owner, (slot, first, count) in enumerate(windows)
            if slot in asked
            for row in range(first, first + count)
        ]
        index, owners, num_top = upload(columns, device).view(-1, 3).t().contiguous().unbind(0)
        width = max((num_top for _, _, num_top in columns), default=0)
        return cls(index, owners, num_top, width)


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


def score_rows(scored: ScoredRows, raw: Tensor, chosen: Tensor) -> TokenLogprobs:
    """Score the tokens chosen at rows, a bounded number of rows at a time.

    Args:
        scored: logits rows; one at least.
        raw: [R, V] fp32, their logits as the model computed them.
        chosen: [R] int64.
    """
    parts = []
    for first in range(0, chosen.shape[0], _ROWS_TOGETHER):
        some = slice(first, first + _ROWS_TOGETHER)
        owner, num_top = scored.owner[some], scored.num_top[some]
        parts.append(score_tokens(raw[some], chosen[some], owner, num_top, scored.width))
    return concatenate(parts)


def score_prompt(
    scored: ScoredRows,
    hidden: Tensor,
    following: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
) -> TokenLogprobs:
    """Score the tokens that follow rows of a prompt, a bounded number of rows at a time.

    Args:
        scored: flat rows; one at least.
        hidden: [T, hidden], after the final norm.
        following: [R] int64, the token after each row.
        compute_logits: [L, hidden] to [L, V] fp32.
    """
    parts = []
    for first in range(0, following.shape[0], _ROWS_AT_A_TIME):
        some = slice(first, first + _ROWS_AT_A_TIME)
        logits = compute_logits(hidden[scored.index[some]])
        owner, num_top = scored.owner[some], scored.num_top[some]
        parts.append(score_tokens(logits, following[some], owner, num_top, scored.width))
    return concatenate(parts)


def concatenate(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """Positions of several scorings of equal width, in order."""
    if len(parts) == 1:
        return parts[0]
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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Candidates of R positions, to be turned into ``PositionLogprobs`` by the host.

    Attributes:
        owner: [R] int64, the plan row of each position; ascending.
        chosen_ids, chosen_logprobs, chosen_ranks: [R] int64, fp32, int64 (rank from 1).
        top_ids, top_logprobs: [R, N] int64, fp32, best first; N is the most that any
            request of the step asked for.
        num_top: [R] int64, how many of the N the position's request asked for.
    """

    owner: Tensor
    chosen_ids: Tensor
    chosen_logprobs: Tensor
    chosen_ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    num_top: Tensor
