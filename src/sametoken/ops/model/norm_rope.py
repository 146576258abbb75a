"""RMS norms, rotary embedding and the KV write in plain PyTorch, all row-wise."""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, QKNorm, RotaryTable
from sametoken.ops.model.activation import silu
from sametoken.ops.model.attention.kv import as_stored


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``Kernels.rms_norm``; over the last dimension."""
    return _normed(x.float(), weight, eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``Kernels.gated_rms_norm``."""
    normed = _normed(x.float().unflatten(-1, (-1, weight.shape[0])), weight, eps)
    return (normed.flatten(1) * silu(gate)).to(x.dtype)


def gated_group_norm(
    x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float
) -> Tensor:
    """See ``Kernels.gated_group_norm``."""
    groups = (x.float() * silu(gate)).unflatten(-1, (num_groups, -1))
    return _normed(groups, weight.view(num_groups, -1), eps).flatten(1).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``Kernels.add_rms_norm``."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope_and_cache(
    qkv: Tensor,
    shape: AttentionShape,
    rotary: RotaryTable,
    rows: AttentionRows,
    kv: LayerKV,
    qk_norm: QKNorm | None,
) -> Tensor:
    """See ``Kernels.rope_and_cache``."""
    q, k, v = normed_and_rotated(qkv, shape, rotary, rows.positions, qk_norm)
    block_size = kv.keys.shape[2]
    blocks, offsets = rows.kv_slots // block_size, rows.kv_slots % block_size
    kv.keys[blocks, :, offsets] = as_stored(k, kv.keys.dtype, kv.k_scales)
    kv.values[blocks, :, offsets] = as_stored(v, kv.values.dtype, kv.v_scales)
    return q.to(qkv.dtype)


def normed_and_rotated(
    qkv: Tensor,
    shape: AttentionShape,
    rotary: RotaryTable,
    positions: Tensor,
    qk_norm: QKNorm | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """[T, q|k|v] to q and k in fp32, normed and rotated, and v as it is: [T, heads, head_dim]."""
    parts = qkv.split([shape.q_size, shape.kv_size, shape.kv_size], dim=-1)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (
        part.unflatten(-1, (count, shape.head_dim))
        for part, count in zip(parts, heads, strict=True)
    )
    q, k = q.float(), k.float()
    if qk_norm is not None:
        q = _normed(q, qk_norm.q_weight, qk_norm.eps)
        k = _normed(k, qk_norm.k_weight, qk_norm.eps)
    cos, sin = rotary.cos[positions].unsqueeze(1), rotary.sin[positions].unsqueeze(1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * weight.float()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, head_dim] by [T, 1, rotary_dim / 2], element j with j + half."""
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
