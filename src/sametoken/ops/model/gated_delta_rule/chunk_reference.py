"""The gated delta rule of a chunk of positions as matrix products, in plain PyTorch.

The chunked form of Yang et al., "Gated Delta Networks" (arXiv 2412.06464), by a triangular solve.
It adds in another order than ``reference.advance``, so its bits differ. Those of a chunk are the
same on equal numbers of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.model.gated_delta_rule.reference import normalised
from sametoken.ops.model.recurrent.chunk_reference import decays


def advance_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Run n rows, one after the other: update the state in place, and read it: [n, Hv, Dv].

    q and k are normalised here; each serves Hv / Hk adjacent value heads. All in fp32.

    Args:
        state: [Hv, Dk, Dv].
        q, k: [n, Hk, Dk].
        v: [n, Hv, Dv].
        log_decay, beta: [n, Hv], of every row.
    """
    heads_per_key = v.shape[1] // k.shape[1]
    q, k = (normalised(x).repeat_interleave(heads_per_key, dim=1).transpose(0, 1) for x in (q, k))
    q, v, beta = q / q.shape[-1] ** 0.5, v.transpose(0, 1), beta.t()[..., None]
    own = log_decay.t().contiguous()
    whole, between = decays(own)
    # Memory of its own: a library's additions may follow a state's place in memory.
    before = state.clone()
    couplings = beta * (k @ k.mT) * between
    missing = beta * (v - (k @ before) * whole)
    deltas = torch.linalg.solve_triangular(couplings, missing, upper=False, unitriangular=True)
    out: Tensor = (q @ before) * whole + ((q @ k.mT) * between) @ deltas
    last = between[:, -1, :, None]
    state.copy_(before * whole[:, -1:] + (k * last).mT @ deltas)
    return out.transpose(0, 1)
