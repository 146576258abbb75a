"""Causal attention over paged KV in plain PyTorch, one row at a time.

Every shape depends on the row's position only, so decode, window and prefill rows get the same
bits. Positions that the row cannot see are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.backend import (
    AttentionShape,
    LayerKV,
    QueryRows,
)
from sametoken.ops.model.attention.kv import as_read
from sametoken.ops.model.one_thread import one_thread


def attention(
    q: Tensor,
    shape: AttentionShape,
    rows: QueryRows,
    kv: LayerKV,
    sinks: Tensor | None = None,
) -> Tensor:
    """See ``Kernels.attention``."""
    out = torch.empty_like(q).flatten(1)
    stops = (rows.positions + 1).tolist()
    for row, (slot, stop) in enumerate(zip(rows.slots.tolist(), stops, strict=True)):
        first = max(0, stop - (shape.sliding_window or stop))
        keys = as_read(_gathered(kv.keys, rows.block_table[slot], first, stop), kv.k_scales)
        values = as_read(_gathered(kv.values, rows.block_table[slot], first, stop), kv.v_scales)
        grouped = q[row].clone().float().unflatten(0, (shape.num_kv_heads, -1))
        with one_thread():
            weights = _weights(grouped @ keys.mT * shape.scale, sinks)
            out[row] = (weights @ values).flatten().to(q.dtype)
    return out


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of [kv_heads, group, positions]; a head's sink takes its share and is left out."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    beside = sinks.view(*scores.shape[:2], 1)
    return torch.softmax(torch.cat((scores, beside), dim=-1), dim=-1)[..., :-1]


def _gathered(cache: Tensor, blocks: Tensor, first: int, stop: int) -> Tensor:
    """Positions ``first .. stop - 1`` of one slot: [kv_heads, positions, head_dim]."""
    block_size = cache.shape[2]
    before = first // block_size
    used = cache[blocks[before : -(-stop // block_size)]]
    at = slice(first - before * block_size, stop - before * block_size)
    return used.transpose(0, 1).flatten(1, 2)[:, at].contiguous()
