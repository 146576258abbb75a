"""A model that overflows behind one token: its requests fail alike with drafts or without."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from helpers.families import write_family
from sametoken import LLM, SamplingParams

#: Its embedding is finite, so the checkpoint loads, and times the model's multiplier it is not.
OVERFLOWING = 9
NUM_DRAFTS = 4
PROMPTS = [[4, 5, 6, 4, 5, 6, 4, 5]] * 40


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Answers of the model by stop tokens, plainly and with a twin's drafts."""
    folder = tmp_path_factory.mktemp("nan")
    twin, path = (write_family(folder / name, "granite") for name in ("twin", "target"))
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][OVERFLOWING] = 3e38
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    options = {
        "model": str(path),
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 32,
        "num_kv_blocks": 64,
        "max_num_seqs": 8,
    }
    speculation = {
        "method": "draft_model",
        "model": str(twin),
        "num_speculative_tokens": NUM_DRAFTS,
        "draft_limits": "fixed",
    }
    found = []
    for config in (None, speculation):
        with LLM(**options, speculative_config=config) as llm:
            found.append({stops: answers_of(llm, stops) for stops in ((), (OVERFLOWING,))})
    return found


def answers_of(llm: LLM, stop_token_ids: tuple[int, ...]):
    params = [
        SamplingParams(
            temperature=1.5,
            seed=seed,
            max_tokens=12,
            allowed_token_ids=[3, 4, 5, OVERFLOWING],
            stop_token_ids=stop_token_ids,
            detokenize=False,
        )
        for seed in range(len(PROMPTS))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [output.outputs[0] for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("stop_token_ids", [(), (OVERFLOWING,)])
def test_nan_behind_an_accepted_draft_takes_no_token(answers, stop_token_ids):
    plain, drafted = (found[stop_token_ids] for found in answers)
    assert [(one.token_ids, one.finish_reason) for one in drafted] == [
        (one.token_ids, one.finish_reason) for one in plain
    ]
    ends = [one for one in plain if one.token_ids[-1:] == (OVERFLOWING,)]
    assert {one.finish_reason for one in ends} == {"stop" if stop_token_ids else "error"}
    # The twin had drafted the token, and it was emitted in a window.
    assert any(
        len(one.token_ids) > len(one.windows) and one.windows[-1][0] == NUM_DRAFTS
        for one in drafted
    )
