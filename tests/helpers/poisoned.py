"""Tensors between NaNs, where kernels of a GPU run or are interpreted, and how close two may be."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: (1e-6, 1e-6), torch.float16: (2e-3, 1e-3)}


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """The same values between NaNs."""
    memory = torch.full((x.numel() + 512,), torch.nan, dtype=x.dtype, device=DEVICE)
    memory[256 : 256 + x.numel()] = x.flatten()
    return memory[256 : 256 + x.numel()].view(x.shape)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return poisoned(torch.randn(shape, generator=generator).to(dtype))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
