"""Generators for a part of a training, which follow from its seed and a name alone."""

from __future__ import annotations

import hashlib

import torch


def generator_of(seed: int, part: str, index: int = 0) -> torch.Generator:
    """A generator on the host.

    Args:
        seed: of the training.
        part: what it draws, so that two parts never draw the same.
        index: of the step or epoch.
    """
    # A hash: the generator reads 32 bits of its seed and no more.
    digest = hashlib.blake2b(f"{seed}/{part}/{index}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
