"""Memory that must not be read: around tensors, and what torch hands out uninitialised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: (1e-6, 1e-6), torch.float16: (2e-3, 1e-3)}


def poisoned(x: torch.Tensor, poison: float = torch.nan) -> torch.Tensor:
    """The same values with poison before and after them."""
    memory = torch.full((x.numel() + 512,), poison, device=x.device).to(x.dtype)
    memory[256 : 256 + x.numel()] = x.flatten()
    return memory[256 : 256 + x.numel()].view(x.shape)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random values between NaNs, where kernels of a GPU run or are interpreted."""
    generator = torch.Generator().manual_seed(seed)
    return poisoned(torch.randn(shape, generator=generator).to(DEVICE, dtype))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out uninitialised holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
