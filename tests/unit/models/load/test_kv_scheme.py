"""Scales of keys and values: the heads of each rank, and files that are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sametoken.errors import CheckpointError
from sametoken.models.load.kv_scheme import read_kv_scales, with_scales
from sametoken.models.load.sent import SentTensors
from sametoken.models.load.weights import WeightReader
from sametoken.ops.cache_types import LatentKV, PagedKV, Stateless
from sametoken.ops.reference import ReferenceKernels

BESIDE = "block.k_scale", "block.v_scale"
WITHIN = "block.k_proj.k_scale", "block.v_proj.v_scale"


def reader_of(k: torch.Tensor, rank: int = 0, size: int = 1, names=BESIDE) -> WeightReader:
    source = SentTensors([*zip(names, (k, 2 * k), strict=True)])
    parallel = SimpleNamespace(rank=rank, size=size)
    return WeightReader(source, ReferenceKernels(), torch.float32, torch.device("cpu"), parallel)


def read(strategy: str, k: torch.Tensor, *options, **names):
    whole = PagedKV(4, 8, 8, torch.float8_e4m3fn)
    return read_kv_scales(reader_of(k, *options, **names), "block", strategy, whole)


@pytest.mark.parametrize(("rank", "size", "heads"), [(0, 2, [0, 1]), (1, 2, [2, 3]), (5, 8, [2])])
def test_a_rank_has_the_scales_of_its_heads(rank, size, heads):
    by_head = torch.tensor([0.25, 0.5, 1.0, 2.0]).bfloat16()
    found = read("attn_head", by_head.view(4, 1, 1), rank, size)
    assert torch.equal(found.k, by_head[heads].float())
    assert torch.equal(found.v, 2 * found.k)
    of_all = read("tensor", by_head[:1], rank, size)
    assert torch.equal(of_all.k, torch.full((len(heads),), 0.25))


def test_they_may_lie_in_the_projections():
    """As Model Optimizer writes them."""
    found = read("tensor", torch.tensor(0.25), names=WITHIN)
    assert torch.equal(found.k, torch.full((4,), 0.25))
    assert torch.equal(found.v, 2 * found.k)


@pytest.mark.parametrize(
    ("strategy", "k"),
    [
        ("tensor", torch.ones(4)),
        ("attn_head", torch.ones(3, 1, 1)),
        ("tensor", torch.zeros(1)),
        ("tensor", -torch.ones(1)),
        ("tensor", torch.full((1,), torch.nan)),
    ],
)
def test_other_shapes_and_values_are_refused(strategy, k):
    with pytest.raises(CheckpointError, match=r"tensor block\.k_scale"):
        read(strategy, k)


@pytest.mark.parametrize("names", [BESIDE, WITHIN])
def test_latents_have_the_scale_of_the_keys_on_every_rank(names):
    reader, cache = reader_of(torch.tensor([0.25]), 1, 2, names), LatentKV(8, 4, torch.bfloat16)
    found = with_scales(cache, reader, "block", "tensor")
    assert torch.equal(found.scale, torch.tensor([0.25]))
    reader.require_all_read(allowed=())
    assert found.part(torch.zeros(1)).scale is None, "vectors in 16 bits need none"


def test_caches_without_keys_of_their_own_have_no_scales():
    reader = reader_of(torch.ones(1))
    for cache in (PagedKV(0, 8, 8, torch.bfloat16), Stateless()):
        assert with_scales(cache, reader, "block", "tensor") == cache
