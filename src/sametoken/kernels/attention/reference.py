"""Causal attention over paged KV in plain PyTorch, one row at a time.

Every shape below is set by the row's position alone, so a row cannot tell whether it is a
decode, a window or a prefill row. Positions above the row's own are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.kernels.interface import AttentionRows, AttentionShape, LayerKV


def attention(q: Tensor, shape: AttentionShape, rows: AttentionRows, kv: LayerKV) -> Tensor:
    """Attention of [T, H, D] queries over their slots' KV: [T, H * D]."""
    out = torch.empty_like(q).flatten(1)
    lengths = (rows.positions + 1).tolist()
    for row, (slot, length) in enumerate(zip(rows.slots.tolist(), lengths, strict=True)):
        keys = _gathered(kv.keys, rows.block_table[slot], length)
        values = _gathered(kv.values, rows.block_table[slot], length)
        grouped = q[row].clone().float().unflatten(0, (shape.num_kv_heads, -1))
        weights = torch.softmax(grouped @ keys.mT * shape.scale, dim=-1)
        out[row] = (weights @ values).flatten().to(q.dtype)
    return out


def _gathered(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first ``length`` positions of one slot: [kv_heads, length, head_dim] fp32."""
    block_size = cache.shape[2]
    used = cache[blocks[: -(-length // block_size)]].float()
    return used.transpose(0, 1).flatten(1, 2)[:, :length].contiguous()
