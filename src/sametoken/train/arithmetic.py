"""Row arithmetic that frozen and trainable networks share with the engine."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32, rounded once."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., heads, head_dim] by [..., 1, rotary_dim / 2], element j with j + half."""
    half = cos.shape[-1]
    wide = x.float()
    low, high, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).to(x.dtype)
