"""Mamba-2's state space rule of a chunk of positions as matrix products, in plain PyTorch.

The chunks of Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), section 6. It adds in another
order than ``reference.advance``, so its bits differ. Those of a chunk are the same on equal numbers
of threads.
"""

from __future__ import annotations

from torch import Tensor

from sametoken.ops.model.recurrent.chunk_reference import decays


def advance_chunk(
    state: Tensor, x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, step: Tensor
) -> Tensor:
    """Run n rows, one after the other: update the state in place, and read it: [n, H, P].

    All in fp32.

    Args:
        state: [H, P, N].
        x: [n, H, P].
        b, c: [n, G, N]; each serves H / G adjacent heads.
        log_decay, step: [n, H], of every row.
    """
    heads_per_group = x.shape[1] // b.shape[1]
    b, c = (shared.repeat_interleave(heads_per_group, dim=1).transpose(0, 1) for shared in (b, c))
    x = (x * step[..., None]).transpose(0, 1)
    whole, between = decays(log_decay.t().contiguous())
    # Memory of its own: a library's additions may follow a state's place in memory.
    before = state.clone()
    out: Tensor = (c @ before.mT) * whole + ((c @ b.mT) * between) @ x
    last = between[:, -1, :, None]
    state.copy_(before * whole[:, -1:] + (x * last).mT @ b)
    return out.transpose(0, 1)
