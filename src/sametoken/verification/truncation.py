"""min_p, top_k and top_p: tokens too unlikely to be sampled lose their chance.

No bit of a row depends on its company: the sums here run in sequence along the row
(``cumsum``), never by ``sum``, whose order PyTorch chooses by the number of rows.
"""

from __future__ import annotations

from torch import Tensor

_FORBIDDEN = float("-inf")

# Nuclei are rarely wider; a row that needs more is sorted whole.
_LEADERS = 256


def truncate(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """Logits with -inf where a token is cut off; the others keep their bits.

    Each cut sees what the one before left, in vLLM's order. Probabilities are those of
    logits / temperature.

    Args:
        logits: [R, V] fp32, not written.
        temperature: [R] fp32, above 0.
        min_p: [R] fp64, 0 keeps all.
        top_k: [R] int64, 0 keeps all. All tokens equal to the k-th are kept.
        top_p: [R] fp64, 1 keeps all. The shortest prefix of the stable descending order
            whose mass reaches p is kept, never less than one token.

    Returns:
        [R, V] fp32.
    """
    scaled = logits / temperature[:, None]
    best = scaled.amax(dim=-1, keepdim=True)
    cut = (scaled - best) < min_p.log()[:, None]
    scaled.masked_fill_(cut, _FORBIDDEN)

    limited = (top_k > 0).nonzero().squeeze(1)
    if limited.numel():
        k = top_k[limited].clamp(max=logits.shape[1])
        kth = scaled[limited].topk(int(k.max()), dim=-1).values.gather(1, k[:, None] - 1)
        scaled[limited] = scaled[limited].masked_fill(scaled[limited] < kth, _FORBIDDEN)

    partial = (top_p < 1).nonzero().squeeze(1)
    if partial.numel():
        outside = ~_nucleus(scaled[partial], top_p[partial, None])
        scaled[partial] = scaled[partial].masked_fill(outside, _FORBIDDEN)
    return logits.masked_fill(scaled == _FORBIDDEN, _FORBIDDEN)


def _nucleus(scaled: Tensor, top_p: Tensor) -> Tensor:
    """[R, V] bool: the tokens of each row's nucleus."""
    vocab_size = scaled.shape[1]
    best = scaled.amax(dim=-1, keepdim=True)
    goal = top_p * _mass(scaled, best)[:, -1:]
    leaders = scaled.topk(min(_LEADERS, vocab_size), dim=-1).values
    reached = _mass(leaders, best)
    size = _nucleus_size(reached, goal)
    last = leaders.gather(1, size - 1)

    wide = (reached[:, -1:] < goal).squeeze(1).nonzero().squeeze(1)
    if wide.numel() and leaders.shape[1] < vocab_size:
        ordered = scaled[wide].sort(dim=-1, descending=True).values
        size[wide] = _nucleus_size(_mass(ordered, best[wide]), goal[wide])
        last[wide] = ordered.gather(1, size[wide] - 1)

    above, level = scaled > last, scaled == last
    num_level = size - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= num_level))


def _mass(scaled: Tensor, best: Tensor) -> Tensor:
    """[R, W] fp64: running sums of exp(scaled - best)."""
    return (scaled - best).double().exp_().cumsum(dim=-1)


def _nucleus_size(reached: Tensor, goal: Tensor) -> Tensor:
    """[R, 1] int64: tokens in descending order until the goal is reached, the last counted."""
    short = (reached < goal).sum(dim=-1, keepdim=True)
    return (short + 1).clamp(max=reached.shape[1])
