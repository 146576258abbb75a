"""min_p, top_k and top_p in plain PyTorch; also the CPU path.

What is cut off a row is a function of its logits and of its slot's four numbers:

- Tokens are ordered by falling logit; of equal ones the lower id comes first.
- min_p keeps those at least min_p times as likely as the best: ``d >= log(min_p)`` for the
  distance ``d = (logit - best) * (1 / T)``, each operation rounded to fp32; 0 for the best.
- top_k keeps the k first, and all that equal the k-th.
- top_p, of what the other two leave, keeps the shortest prefix whose mass reaches its goal, and
  never less than one token. A token's mass is the integer ``floor(exp(d) * 2^40)``; the goal is
  ``top_p * total``, in fp64 rounded once for the conversion and once for the product, then up.

Integers have one sum in whatever order they are added, so no bit of a row can depend on its
company. 2^17 tokens weigh less than 2^58; those below a 2^-40th of the best weigh nothing.
A row that holds NaN is left as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.backend import Cuts

MASS_OF_BEST = 2**40

_FORBIDDEN = float("-inf")

# Nuclei are rarely wider; a row that needs more is sorted whole.
_LEADERS = 256

# Rows are independent, so a bounded number at a time costs no bits and saves memory.
_ROWS_AT_A_TIME = 16


def truncate(logits: Tensor, slots: Tensor, cuts: Cuts) -> None:
    """Write -inf where a row's slot cuts a token off; all other logits keep their bits.

    Args:
        logits: [L, V] fp32, written. Rows of greedy slots keep all: their best outlives any cut.
        slots: [L] int64, the slot of each row.
        cuts: by slot.
    """
    some_cut = (cuts.min_p > 0) | (cuts.top_k > 0) | (cuts.top_p < 1)
    rows = (some_cut & (cuts.temperature > 0))[slots].nonzero().squeeze(1)
    for first in range(0, rows.shape[0], _ROWS_AT_A_TIME):
        some = rows[first : first + _ROWS_AT_A_TIME]
        at = slots[some]
        of_rows = Cuts(cuts.temperature[at], cuts.top_k[at], cuts.top_p[at], cuts.min_p[at])
        logits[some] = _truncated(logits[some], of_rows)


def _truncated(logits: Tensor, cuts: Cuts) -> Tensor:
    """[R, V] logits with -inf where a token is cut off; ``cuts`` has a number for each row."""
    best = logits.amax(dim=-1, keepdim=True)
    distance = (logits - best) * (1 / cuts.temperature[:, None])
    distance = torch.where(logits == best, 0.0, distance)
    kept = distance >= cuts.min_p.log()[:, None]

    limited = (cuts.top_k > 0).nonzero().squeeze(1)
    if limited.numel():
        k = cuts.top_k[limited].clamp(max=logits.shape[1])
        kth = logits[limited].topk(int(k.max()), dim=-1).values.gather(1, k[:, None] - 1)
        kept[limited] &= logits[limited] >= kth

    partial = (cuts.top_p < 1).nonzero().squeeze(1)
    if partial.numel():
        left = logits[partial].masked_fill(~kept[partial], _FORBIDDEN)
        masses = distance[partial].double().exp_().mul_(MASS_OF_BEST).long()
        masses.masked_fill_(~kept[partial], 0)
        kept[partial] &= _nucleus(left, masses, cuts.top_p[partial, None])
    return logits.masked_fill(~(kept | best.isnan()), _FORBIDDEN)


def _nucleus(logits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    """[R, V] bool: the tokens of each row's nucleus; [R, V] int64 masses, [R, 1] fp64 top_p."""
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
    """The tokens that reach the goal: how many they are, and the last one's logit: [R, 1] each.

    Only the ``count`` first are looked at; a size of count + 1 says that they do not reach it.
    """
    leaders, order = logits.topk(count, dim=-1)
    reached = masses.gather(1, order).cumsum(dim=-1)
    size = (reached < goal).sum(dim=-1, keepdim=True) + 1
    return size, leaders.gather(1, (size - 1).clamp(max=count - 1))
