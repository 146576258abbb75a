"""Models with latent attention compute what transformers computes, the same bits in every form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.families import VOCAB, random_model
from helpers.forward import Bench, load
from helpers.latents import LATENTS, drawn_latent, write_latent
from helpers.parity import (
    BACKENDS,
    drawn_models,
    require_parity,
    require_parity_of_ranks,
    saved_and_loaded,
)

PROMPT = torch.randint(VOCAB, (41,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module", params=LATENTS)
def checkpoint(request, tmp_path_factory):
    return write_latent(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("name", LATENTS)
@drawn_models(5)
@given(data=st.data())
def test_random_models_agree_with_transformers(name, data):
    config = drawn_latent(data.draw, name)
    theirs = random_model(config, data.draw(st.integers(0, 2**20)))
    ours = saved_and_loaded(theirs, data.draw(st.sampled_from(BACKENDS)))
    require_parity(ours, theirs, PROMPT, data.draw(st.lists(st.integers(1, 12), max_size=3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_chunk(checkpoint, dtype):
    for kernels in BACKENDS:
        ours = load(checkpoint, kernels, dtype=dtype)
        whole = Bench(ours).logits(PROMPT, [])
        assert torch.equal(Bench(ours).logits(PROMPT, [1] * len(PROMPT)), whole)
        assert torch.equal(Bench(ours).logits(PROMPT, [3, 11]), whole)


def test_two_ranks_agree_and_are_near_one(checkpoint):
    require_parity_of_ranks(checkpoint, PROMPT)
