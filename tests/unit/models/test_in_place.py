"""New tensors take the places of old ones: all of them, each once, and only if the form is one."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from sametoken.errors import InvariantError, WeightUpdateError
from sametoken.models.in_place import Replacement, children_of
from sametoken.ops.native.library import NativeLibrary


@dataclass(frozen=True)
class Part:
    weight: Tensor
    bias: Tensor | None = None
    name: str = "part"


def model(seed: int) -> tuple:
    noise = torch.Generator().manual_seed(seed)
    tied = torch.randn(3, 2, generator=noise)
    layers = [Part(torch.randn(4, generator=noise), torch.randn(2, generator=noise))]
    return (Part(tied), layers, Part(tied), 7, torch.empty(0))


def test_every_tensor_is_copied_into_its_place_once():
    live, loaded = model(0), model(1)
    addresses = [live[0].weight.data_ptr(), live[1][0].weight.data_ptr()]
    replacement = Replacement.of(live, loaded)
    assert len(replacement.pairs) == 3
    assert not torch.equal(live[0].weight, loaded[0].weight)
    replacement.write()
    assert torch.equal(live[2].weight, loaded[2].weight)
    assert torch.equal(live[1][0].bias, loaded[1][0].bias)
    assert [live[0].weight.data_ptr(), live[1][0].weight.data_ptr()] == addresses


def test_the_functions_of_a_library_are_no_part_of_a_weight():
    """A mixture has 18,000 weights, and each of them refers to all functions."""
    library = NativeLibrary(*map(str, range(len(fields(NativeLibrary)))))
    assert not list(children_of(library))


def test_what_both_share_stays():
    live, loaded = model(0), model(1)
    replacement = Replacement.of(live, (live[0], loaded[1], *live[2:]))
    assert [old is live[1][0].weight for old, _ in replacement.pairs] == [True, False]


def test_what_is_left_out_stays():
    live, loaded = model(0), model(1)
    replacement = Replacement.of(live, loaded).without([loaded[1][0].bias])
    assert [old is live[1][0].bias for old, _ in replacement.pairs] == [False, False]
    with pytest.raises(InvariantError, match="leaves out"):
        replacement.without([loaded[1][0].bias])


@pytest.mark.parametrize("side", [0, 1])
def test_weights_are_shared_in_both_or_in_neither(side):
    both = [model(0), model(1)]
    embedding, layers, head, *rest = both[side]
    both[side] = (embedding, layers, replace(head, weight=head.weight.clone()), *rest)
    with pytest.raises(WeightUpdateError, match=r"2\.weight"):
        Replacement.of(*both)


@pytest.mark.parametrize(
    "bias", [None, torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(4)[::2]]
)
def test_another_form_is_refused_before_anything_is_written(bias):
    live, loaded = model(0), model(1)
    before = live[0].weight.clone()
    with pytest.raises(InvariantError, match=r"1\.0\.bias"):
        Replacement.of(live, (loaded[0], [replace(loaded[1][0], bias=bias)], *loaded[2:]))
    assert torch.equal(live[0].weight, before)
