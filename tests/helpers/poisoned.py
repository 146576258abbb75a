"""Tensors between NaNs, where kernels of a GPU run or are interpreted."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """The same values between NaNs."""
    memory = torch.full((x.numel() + 512,), torch.nan, dtype=x.dtype, device=DEVICE)
    memory[256 : 256 + x.numel()] = x.flatten()
    return memory[256 : 256 + x.numel()].view(x.shape)


def noise(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return poisoned(torch.randn(shape, generator=generator).to(dtype))
