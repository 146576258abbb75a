"""The gated delta rule over whole sequences, differentiable: chunks side by side.

The row form is ``kernels/gated_delta_rule/reference.py``. Within a chunk of C rows with decays
``exp(g)`` summed up to ``c_i``, the updates d of Yang et al. (arXiv:2412.06464) solve

    (I + A) d = beta * (v - exp(c) * k S),   A_ij = beta_i * exp(c_i - c_j) * k_i . k_j, j < i,

S being the state before the chunk, so that all chunks are solved at once, and only S runs
through them in order. Emitted tokens never pass through it: it rounds otherwise than the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
NORM_EPS = 1e-6


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """[B, L, Hv, Dv] fp32 from a state of zero.

    Args:
        q, k: [B, L, Hk, Dk]; normalised here, each serves Hv / Hk adjacent value heads.
        v: [B, L, Hv, Dv].
        log_decay, beta: [B, L, Hv].
    """
    length, ratio = v.shape[1], v.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5
    q, k = (_normalised(x.float()).repeat_interleave(ratio, dim=2) for x in (q, k))
    q, k, v = (_chunks(x) for x in (q * scale, k, v.float()))
    beta = _chunks(beta.float()[..., None])
    total = _chunks(log_decay.float()[..., None]).cumsum(-2)
    # exp(c_i - c_j) of j <= i, which is at most 1; above it is masked before it can overflow.
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (total - total.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
    inner = beta * decay * (k @ k.transpose(-1, -2))
    wanted = torch.cat((beta * v, beta * total.exp() * k), dim=-1)
    solved = _inverse(inner) @ wanted
    of_values, of_state = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    within = decay * (q @ k.transpose(-1, -2))
    decayed_q = q * total.exp()
    decayed_k = (k * (total[..., -1:, :] - total).exp()).transpose(-1, -2)
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for index in range(v.shape[2]):
        update = of_values[:, :, index] - of_state[:, :, index] @ state
        outputs.append(decayed_q[:, :, index] @ state + within[:, :, index] @ update)
        state = state * total[:, :, index, -1:].exp() + decayed_k[:, :, index] @ update
    return torch.cat(outputs, dim=2).transpose(1, 2)[:, :length]


def _inverse(inner: Tensor) -> Tensor:
    """``(I + A)^-1`` of [..., C, C], A being what of ``inner`` lies below the diagonal.

    Blocks on the diagonal are inverted at size 1, then joined two by two. That is forward
    substitution, so it is as exact, where a product of powers of A would not be: they grow
    like binomials when keys repeat.
    """
    places = torch.arange(CHUNK, device=inner.device)
    inverse = torch.eye(CHUNK, device=inner.device, dtype=inner.dtype)
    size = 1
    while size < CHUNK:
        blocks = places // size
        joined = blocks[:, None] == blocks[None] + 1
        joined &= (blocks % 2 == 1)[:, None]
        inverse = inverse - inverse @ (inner * joined) @ inverse
        size *= 2
    return inverse


def _chunks(x: Tensor) -> Tensor:
    """[B, L, H, D] to [B, H, L / C, C, D], zeros after the end."""
    padded = functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return torch.unflatten(padded.transpose(1, 2), 2, (-1, CHUNK))


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
