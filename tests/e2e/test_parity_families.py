"""Every family computes what transformers computes, and drafts and ranks change no token."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers.utils import logging as transformers_logging

from helpers.families import FAMILIES, SEEING, VOCAB, drawn_config, random_model, write_family
from helpers.forward import CPU, Bench, their_greedy
from helpers.harness import request, run
from helpers.thread_ranks import run_ranks
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.layers.parallel import SINGLE_RANK
from sametoken.models.loader import load_model
from sametoken.ops.dispatch import select_kernels
from sametoken.ops.reference import ReferenceKernels

transformers_logging.disable_progress_bar()
NUM_GREEDY = 4
BACKENDS = [ReferenceKernels(), select_kernels(CPU)]
PROMPT = torch.randint(VOCAB, (29,), generator=torch.Generator().manual_seed(0)).tolist()


def load(path, kernels, parallel=SINGLE_RANK, dtype=torch.float32):
    return load_model(
        path, kernels=kernels, dtype=dtype, device=CPU, max_positions=128, parallel=parallel
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """The name of a family, and a checkpoint."""
    return request.param, write_family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("name", FAMILIES)
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_models_agree_with_transformers(name, data):
    config = drawn_config(data.draw, name)
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
def test_a_row_has_the_same_bits_in_every_chunk(family, dtype):
    for kernels in BACKENDS:
        ours = load(family[1], kernels, dtype=dtype)
        whole = Bench(ours).logits(PROMPT, [])
        assert torch.equal(Bench(ours).logits(PROMPT, [1] * len(PROMPT)), whole)
        assert torch.equal(Bench(ours).logits(PROMPT, [3, 11]), whole)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(family, temperature):
    def tokens(spec):
        core = build_engine(
            EngineConfig.from_options(
                model=str(family[1]),
                device="cpu",
                dtype="bfloat16",
                max_model_len=96,
                max_num_seqs=4,
                block_size=4,
                num_kv_blocks=80,
                speculative_config=spec,
            )
        )
        prompts = [PROMPT[:9] * 2, PROMPT[3:9] * 3, PROMPT]
        items = [
            request(f"r{i}", prompt, 24, temperature=temperature, seed=i)
            for i, prompt in enumerate(prompts)
        ]
        return run(core, items)

    plain = tokens(None)
    drafted = tokens({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    assert drafted.tokens == plain.tokens
    assert drafted.offered > drafted.accepted, "some drafts were wrong"


def test_two_ranks_agree_and_are_near_one(family):
    whole = Bench(load(family[1], BACKENDS[0])).logits(PROMPT, [])

    def logits(parallel):
        return Bench(load(family[1], BACKENDS[0], parallel)).logits(PROMPT, [7])

    first, second = run_ranks(2, logits)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SEEING)
def test_the_text_decoder_of_a_model_that_also_sees(tmp_path, name):
    theirs = random_model(SEEING[name](), seed=1)
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    assert (Bench(load(tmp_path, BACKENDS[1])).logits(PROMPT, [7]) - expected).abs().max() < 1e-4
    said = []
    options = {"device": "cpu", "max_model_len": 64, "num_kv_blocks": 40, "max_num_seqs": 2}
    build_engine(EngineConfig.from_options(model=str(tmp_path), **options), said.append)
    assert sum("only the text decoder is loaded" in line for line in said) == 1
