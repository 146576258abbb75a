"""Log-probabilities, ranks and top tokens of positions, as device tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from sametoken.state.upload import upload

_ID_MASK = 0xFFFFFFFF
# Bounds the logits in memory while a prompt is scored: 64 rows of 150k are 38 MB.
_PROMPT_ROWS_PER_CHUNK = 64
# Output logits exist already; scoring 256 rows of 150k takes another 620 MB.
_ROWS_PER_CHUNK = 256
# On a GPU, softmax adds up a row in an order that follows from its address within 16 bytes.
_ALIGNED = 4


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """R rows of a step with log-probabilities requested.

    Attributes:
        index: [R] int64, indices of logits rows (or of rows), ascending.
        owner: [R] int64, the scheduled request of each.
        num_top: [R] int64, top tokens requested, 0..width.
        width: the largest ``num_top``.
    """

    index: Tensor
    owner: Tensor
    num_top: Tensor
    width: int

    @classmethod
    def of(
        cls,
        requested: Mapping[int, int],
        rows: Iterable[tuple[int, int, int]],
        device: torch.device,
    ) -> ScoredRows | None:
        """From host values only: no device read; None if there are none.

        Args:
            requested: number of top tokens by slot.
            rows: slot, first row and number of rows of each scheduled request. Dead rows are
                scored too; the host drops positions that were not emitted.
            device: where the rows' logits are.
        """
        if not requested:
            return None
        columns = [
            (row, owner, requested[slot])
            for owner, (slot, first, count) in enumerate(rows)
            if slot in requested
            for row in range(first, first + count)
        ]
        if not columns:
            return None
        index, owners, num_top = upload(columns, device).t().contiguous().unbind(0)
        return cls(index, owners, num_top, max(num_top for _, _, num_top in columns))


def log_probabilities(logits: Tensor) -> Tensor:
    """[R, V] fp32 logits to log-probabilities, as the engine reports them and a trainer repeats."""
    size = logits.shape[1]
    if lacking := -size % _ALIGNED:
        logits = functional.pad(logits, (0, lacking), value=-torch.inf)
    return logits.log_softmax(dim=-1)[:, :size]


def score_tokens(
    logits: Tensor, chosen: Tensor, owner: Tensor, num_top: Tensor, width: int
) -> TokenLogprobs:
    """Score chosen tokens against logits.

    Ties rank by token id, lowest first, in ``chosen_ranks`` and in the top tokens.

    Args:
        logits: [R, V] fp32, the model's output, raw or processed.
        chosen: [R] int64, the tokens to score.
        owner: [R] int64, ascending.
        num_top: [R] int64, top tokens requested, 0..width.
        width: N of the result, at most V.
    """
    width = min(width, logits.shape[1])
    logprobs = log_probabilities(logits)
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


def score_rows(scored: ScoredRows, logits: Tensor, chosen: Tensor) -> TokenLogprobs:
    """Score chosen tokens in chunks of rows.

    Args:
        scored: logits rows.
        logits: [R, V] fp32, of these rows.
        chosen: [R] int64.
    """
    return _score_chunks(scored, chosen, _ROWS_PER_CHUNK, lambda chunk: logits[chunk])


def score_prompt(
    scored: ScoredRows,
    hidden: Tensor,
    following: Tensor,
    temperature: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
) -> TokenLogprobs:
    """Score the tokens that follow rows of a prompt, in chunks of rows.

    Args:
        scored: rows.
        hidden: [T, hidden], after the final norm.
        following: [R] int64, the token after each row.
        temperature: [R] fp32, divides each row's logits; 1 changes no bit.
        compute_logits: [L, hidden] to [L, V] fp32.
    """

    def logits_of(chunk: slice) -> Tensor:
        return compute_logits(hidden[scored.index[chunk]]) / temperature[chunk, None]

    return _score_chunks(scored, following, _PROMPT_ROWS_PER_CHUNK, logits_of)


def _score_chunks(
    scored: ScoredRows, chosen: Tensor, num_rows: int, logits_of: Callable[[slice], Tensor]
) -> TokenLogprobs:
    """Score ``num_rows`` rows at a time."""
    parts = []
    for first in range(0, chosen.shape[0], num_rows):
        chunk = slice(first, first + num_rows)
        owner, num_top = scored.owner[chunk], scored.num_top[chunk]
        parts.append(score_tokens(logits_of(chunk), chosen[chunk], owner, num_top, scored.width))
    if len(parts) == 1:
        return parts[0]
    names = [f.name for f in fields(TokenLogprobs)]
    return TokenLogprobs(*(torch.cat([getattr(p, name) for p in parts]) for name in names))


def _order_keys(logits: Tensor) -> Tensor:
    """[R, V] int64 sort keys, distinct within a row: by logit, then by lowest token id.

    ``topk`` breaks ties arbitrarily, so with plain logits the result could depend on its width.
    """
    bits = (logits + 0.0).view(torch.int32)
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ascending << 32) | (_ID_MASK - ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Candidates of R positions; the host turns them into ``PositionLogprobs``.

    Attributes:
        owner: [R] int64, the scheduled request of each position; ascending.
        chosen_ids, chosen_logprobs, chosen_ranks: [R] int64, fp32, int64 (rank from 1).
        top_ids, top_logprobs: [R, N] int64, fp32, best first; N is the largest
            number requested in the step.
        num_top: [R] int64, number requested for the position.
    """

    owner: Tensor
    chosen_ids: Tensor
    chosen_logprobs: Tensor
    chosen_ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    num_top: Tensor
