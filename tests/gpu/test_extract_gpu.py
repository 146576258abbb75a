"""Extracted hidden states on a GPU: the same bits alone and in a batch, and plain tokens."""

from __future__ import annotations

import pytest
import torch
from gpu_files import LENGTHS, OPTIONS, write_files

from sametoken import LLM, SamplingParams
from sametoken.extraction.shards import ExtractedStates

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"), "LlamaForCausalLM")["target"]


def generate(target, directory=None, **options):
    spec = {"method": "extract_hidden_states", "shared_storage_path": str(directory)}
    llm = LLM(
        str(target),
        skip_tokenizer_init=True,
        speculative_config=spec if directory else None,
        **OPTIONS | options,
    )
    prompts = [{"prompt_token_ids": [(i * 31 + n) % 1500 for i in range(n)]} for n in LENGTHS]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [
        [*one.prompt_token_ids, *one.outputs[0].token_ids] for one in llm.generate(prompts, params)
    ]


def states(directory) -> dict[tuple[int, ...], torch.Tensor]:
    found = ExtractedStates(directory)
    sequences = [found[i] for i in range(len(found))]
    return {tuple(one.token_ids.tolist()): one.hidden_states for one in sequences}


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_states_and_tokens_do_not_depend_on_company(target, tmp_path, steps_in_flight):
    plain = generate(target)
    options = {"max_num_seqs": 7, "steps_in_flight": steps_in_flight}
    assert generate(target, tmp_path / "together", **options) == plain
    assert generate(target, tmp_path / "alone", max_num_seqs=1, steps_in_flight=1) == plain
    together, alone = states(tmp_path / "together"), states(tmp_path / "alone")
    assert set(together) == set(alone) == set(map(tuple, plain))
    for tokens, rows in together.items():
        assert rows.dtype == torch.bfloat16
        assert torch.equal(rows, alone[tokens])
