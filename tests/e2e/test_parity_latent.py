"""Models with latent attention compute what transformers computes, the same bits in every form."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers.utils import logging as transformers_logging

from helpers.families import VOCAB, random_model
from helpers.forward import CPU, Bench, their_greedy
from helpers.latents import LATENTS, drawn_latent, write_latent
from helpers.thread_ranks import run_ranks
from sametoken.layers.parallel import SINGLE_RANK
from sametoken.models.loader import load_model
from sametoken.ops.dispatch import select_kernels
from sametoken.ops.reference import ReferenceKernels

transformers_logging.disable_progress_bar()
NUM_GREEDY = 4
BACKENDS = [ReferenceKernels(), select_kernels(CPU)]
PROMPT = torch.randint(VOCAB, (41,), generator=torch.Generator().manual_seed(0)).tolist()


def load(path, kernels, parallel=SINGLE_RANK, dtype=torch.float32):
    return load_model(
        path, kernels=kernels, dtype=dtype, device=CPU, max_positions=128, parallel=parallel
    )


@pytest.fixture(scope="module", params=LATENTS)
def checkpoint(request, tmp_path_factory):
    return write_latent(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("name", LATENTS)
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_models_agree_with_transformers(name, data):
    config = drawn_latent(data.draw, name)
    theirs = random_model(config, data.draw(st.integers(0, 2**20)))
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        ours = load(directory, data.draw(st.sampled_from(BACKENDS)))
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    chunks = data.draw(st.lists(st.integers(1, 12), max_size=3))
    assert (Bench(ours).logits(PROMPT, chunks) - expected).abs().max() < 1e-4
    expected_ids = their_greedy(theirs, PROMPT, NUM_GREEDY)
    assert Bench(ours).continue_greedily(PROMPT, NUM_GREEDY) == expected_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_chunk(checkpoint, dtype):
    for kernels in BACKENDS:
        ours = load(checkpoint, kernels, dtype=dtype)
        whole = Bench(ours).logits(PROMPT, [])
        assert torch.equal(Bench(ours).logits(PROMPT, [1] * len(PROMPT)), whole)
        assert torch.equal(Bench(ours).logits(PROMPT, [3, 11]), whole)


def test_two_ranks_agree_and_are_near_one(checkpoint):
    whole = Bench(load(checkpoint, BACKENDS[0])).logits(PROMPT, [])

    def logits(parallel):
        return Bench(load(checkpoint, BACKENDS[0], parallel)).logits(PROMPT, [7])

    first, second = run_ranks(2, logits)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4)
