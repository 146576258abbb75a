"""Generators of a training's parts."""

from __future__ import annotations

import torch

from sametoken.train.compute import generator_of


def test_seed_part_and_index_all_count():
    names = [(0, "a", 0), (1, "a", 0), (2**40, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a", 2**33)]
    drawn = [torch.rand(4, generator=generator_of(*name)).tolist() for name in names]
    assert drawn[0] == torch.rand(4, generator=generator_of(0, "a", 0)).tolist()
    assert len({tuple(one) for one in drawn}) == len(names)
