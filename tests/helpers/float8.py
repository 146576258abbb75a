"""Numbers that are hard to round to float8 e4m3, and what they round to, by looking at all."""

from __future__ import annotations

import torch

ODD = (0.0, 2**-9, 2**-10, 1.001 * 2**-10, 3 * 2**-10, 1e-45, 448.0, 463.9, 464.0, 465.0, 1e30)
ODD += (float("inf"), float("nan"), 17.0, 19.0, 2**-6 - 2**-11)
NUMBERS = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def pool(generator: torch.Generator) -> torch.Tensor:
    """Odd numbers, those halfway between subnormal ones, and random ones, of both signs: fp32."""
    numbers = torch.cat((torch.tensor(ODD), (torch.arange(200) + 0.5) * 2**-9))
    return torch.cat((numbers, -numbers, torch.randn(200, generator=generator) * 90))


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The byte of the number that is nearest, the even one of two."""
    size = x.double().abs().clamp(max=448)
    distance = (size[..., None] - NUMBERS).abs()
    odd = torch.arange(127) % 2
    code = (distance * 2**60 + odd * 2**20).argmin(-1)
    code |= torch.signbit(x).long() << 7
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)
