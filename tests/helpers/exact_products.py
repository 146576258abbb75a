"""What products are in fp64, and how near a sum that is rounded once comes."""

from __future__ import annotations

import torch


def assert_rounded(
    found: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """That products [T, N] were summed in fp32, then rounded once to their dtype.

    Args:
        found: the products.
        x: [T, K] fp64, with its scales.
        matrix: [N, K], likewise.
        bias: [N], or None.
    """
    exact, sizes = x @ matrix.T, x.abs() @ matrix.abs().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    # At most 16 additions in fp32, each with half a unit in the last place.
    assert_near(found, exact, 16 * 2.0**-24 * sizes)


def assert_gated(found: torch.Tensor, sums: torch.Tensor) -> None:
    """That SiLU of the gate times up was rounded once, of rounded sums [T, 2 N]."""
    gate, up = sums.double().chunk(2, 1)
    exact = gate * torch.sigmoid(gate) * up
    assert_near(found, exact, 8 * 2.0**-24 * exact.abs())


def assert_near(found: torch.Tensor, exact: torch.Tensor, more: torch.Tensor) -> None:
    """Within half a unit in the last place of the dtype, and ``more``; NaN is not."""
    dtype = torch.finfo(found.dtype)
    half = exact.abs().clamp(min=dtype.smallest_normal) * (dtype.eps / 2)
    assert ((found.double() - exact).abs() <= half + more).all()
