"""Top-k, top-p and min-p truncation in plain PyTorch; also the CPU path.

The tokens that a row keeps depend on its logits and its slot's four parameters only:

- Tokens are ordered by descending logit, then ascending id.
- min_p keeps tokens at least min_p times as likely as the best: ``d >= log(min_p)`` for the
  distance ``d = (logit - best) * (1 / T)``, each operation rounded to fp32; 0 for the best.
- top_k keeps the first k, and all that equal the k-th.
- top_p keeps the shortest prefix of the remaining tokens whose mass reaches its goal, at least
  one token. A token's mass is the integer ``floor(exp(d) * 2^40)``; the goal is
  ``top_p * total``, in fp64 rounded once for the conversion and once for the product, then up.

Integer sums do not depend on their order, so a row's bits cannot depend on the batch. 2^17 tokens
have a mass below 2^58; tokens below 2^-40 of the best have none. Rows with NaN are unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.sampling.logits_rules import Truncation

MASS_OF_BEST = 2**40

_FORBIDDEN = float("-inf")

# Nuclei are rarely larger; a row that needs more is sorted whole.
_LEADERS = 256

# Rows are independent: batches of bounded size save memory and change no bits.
_ROWS_AT_A_TIME = 16


def truncate(logits: Tensor, slots: Tensor, truncation: Truncation) -> None:
    """Write -inf for truncated tokens; all other logits keep their bits.

    Args:
        logits: [L, V] fp32, written. Rows of greedy slots are skipped: the best token is never
            truncated.
        slots: [L] int64, the slot of each row.
        truncation: by slot.
    """
    samples = truncation.temperature > 0
    if not samples.any():
        return
    truncates = (truncation.min_p > 0) | (truncation.top_k > 0) | (truncation.top_p < 1)
    rows = (truncates & samples)[slots].nonzero().squeeze(1)
    for first in range(0, rows.shape[0], _ROWS_AT_A_TIME):
        some = rows[first : first + _ROWS_AT_A_TIME]
        at = slots[some]
        by_row = Truncation(
            truncation.temperature[at],
            truncation.top_k[at],
            truncation.top_p[at],
            truncation.min_p[at],
        )
        logits[some] = _truncated(logits[some], by_row)


def _truncated(logits: Tensor, truncation: Truncation) -> Tensor:
    """[R, V] logits with -inf for truncated tokens; ``truncation`` is by row here."""
    best = logits.amax(dim=-1, keepdim=True)
    distance = (logits - best) * (1 / truncation.temperature[:, None])
    distance = torch.where(logits == best, 0.0, distance)
    kept = distance >= truncation.min_p.log()[:, None]

    limited = (truncation.top_k > 0).nonzero().squeeze(1)
    if limited.numel():
        k = truncation.top_k[limited].clamp(max=logits.shape[1])
        kth = logits[limited].topk(int(k.max()), dim=-1).values.gather(1, k[:, None] - 1)
        kept[limited] &= logits[limited] >= kth

    partial = (truncation.top_p < 1).nonzero().squeeze(1)
    if partial.numel():
        left = logits[partial].masked_fill(~kept[partial], _FORBIDDEN)
        masses = distance[partial].double().exp_().mul_(MASS_OF_BEST).long()
        masses.masked_fill_(~kept[partial], 0)
        kept[partial] &= _nucleus(left, masses, truncation.top_p[partial, None])
    return logits.masked_fill(~(kept | best.isnan()), _FORBIDDEN)


def _nucleus(logits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    """[R, V] bool: each row's nucleus (top-p set); [R, V] int64 masses, [R, 1] fp64 top_p."""
    total = masses.sum(dim=-1, keepdim=True)
    goal = (top_p * total.double()).ceil().long().clamp(min=1).minimum(total)
    size, last = _prefix(logits, masses, goal, min(_LEADERS, logits.shape[1]))
    wide = (size > _LEADERS).squeeze(1).nonzero().squeeze(1)
    if wide.numel():
        size[wide], last[wide] = _prefix(logits[wide], masses[wide], goal[wide], logits.shape[1])
    above, level = logits > last, logits == last
    num_level = size - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= num_level))


def _prefix(logits: Tensor, masses: Tensor, goal: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Size of the prefix that reaches the goal, and its last logit: [R, 1] each.

    Considers the first ``count`` tokens only; the size is count + 1 if they do not reach it.
    """
    leaders, order = logits.topk(count, dim=-1)
    reached = masses.gather(1, order).cumsum(dim=-1)
    size = (reached < goal).sum(dim=-1, keepdim=True) + 1
    return size, leaders.gather(1, (size - 1).clamp(max=count - 1))
