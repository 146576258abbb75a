"""A language model from scratch: it learns, it loads, it repeats, it goes on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.training import require_mixed_precision, require_one_error_without_memory
from sametoken import LLM, SamplingParams
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.train.corpus import Source
from sametoken.train.lm import train_lm
from sametoken.train.networks import DecoderNetwork
from sametoken.train.options import LMOptions, LoopOptions

SMALL = LMOptions(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    linear_key_heads=1,
    linear_value_heads=2,
    linear_head_dim=16,
    mtp_steps=2,
)
LLAMA = replace(SMALL, architecture="llama", mtp_steps=None)
NEMOTRON = replace(
    SMALL, architecture="nemotron_h", pattern="ME*-", num_experts=4, moe_intermediate_size=24
)
LOOP = LoopOptions(
    steps=3, warmup_steps=2, batch_tokens=256, max_length=64, learning_rate=1e-2, device="cpu"
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    plain, chats = directory / "a.txt", directory / "b.jsonl"
    plain.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    rows = [{"prompt": f"count to {i}", "answer": " ".join(map(str, range(i)))} for i in range(9)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [Source(plain, 0.7), Source(chats, 0.3)]


def train(output, sources, options, loop=LOOP, report=lambda now: None):
    return train_lm(output, sources, options, loop, report=report, announce=lambda line: None)


@pytest.mark.parametrize("options", [SMALL, NEMOTRON], ids=["hybrid", "nemotron_h"])
def test_a_hybrid_learns_with_its_module_and_the_engine_runs_both(sources, tmp_path, options):
    reports = []
    result = train(tmp_path, sources, options, replace(LOOP, steps=20), reports.append)
    assert reports[-1].loss < reports[0].loss - 1.5
    assert result.perplexity < 60
    assert len(result.acceptance) == 2
    assert result.trained_tokens == 20 * 4 * 64

    params = SamplingParams(temperature=0.0, max_tokens=24)
    plain = LLM(str(tmp_path), device="cpu", dtype="float32").chat(
        [{"role": "user", "content": "count to 5"}], params
    )
    speculative = {"method": "mtp", "num_speculative_tokens": 2}
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", speculative_config=speculative)
    drafted = llm.chat([{"role": "user", "content": "count to 5"}], params)
    assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert llm.speculation_metrics.num_draft_tokens > 0


def test_without_a_module_no_acceptance_is_reported(sources, tmp_path):
    reports = []
    result = train(tmp_path, sources, LLAMA, replace(LOOP, steps=1), reports.append)
    assert [now.acceptance for now in reports] == [()]
    assert (result.acceptance, result.average_length) == ((), 1.0)


@pytest.mark.parametrize("options", [SMALL, LLAMA, NEMOTRON], ids=["hybrid", "llama", "nemotron_h"])
def test_transformers_computes_the_same_logits(sources, tmp_path, options):
    train(tmp_path, sources, options)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, trust_remote_code=False
    ).eval()
    llm = LLM(str(tmp_path), device="cpu", dtype="float32")
    prompt = llm.get_tokenizer()("the quick brown fox")["input_ids"]
    with torch.no_grad():
        wanted = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    for position, found in enumerate(output.prompt_logprobs[1:], 1):
        logprob = found[prompt[position]].logprob
        assert logprob == pytest.approx(float(wanted[position - 1, prompt[position]]), abs=1e-3)


@pytest.mark.parametrize("options", [SMALL, NEMOTRON], ids=["hybrid", "nemotron_h"])
def test_a_seed_names_the_bits_and_a_resumed_training_is_whole(sources, tmp_path, options, cut_off):
    loop = replace(LOOP, steps=6, checkpoint_every=2)
    train(tmp_path / "a", sources, options, loop)
    cut_off(train, tmp_path / "b", sources, options, loop)
    nowhere = [Source(tmp_path / one.path.name, one.share) for one in sources]
    wider, resumed = replace(options, hidden_size=64), replace(loop, resume=True)
    with pytest.raises(ConfigError, match=r"other settings: \['hidden_size'\]"):
        # The sources are not there: nothing is prepared before.
        train(tmp_path / "b", nowhere, wider, resumed)
    train(tmp_path / "b", sources, options, resumed)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_training_goes_on_with_the_same_text_alone(tmp_path, cut_off):
    """Digits are single tokens: another text with as many of them."""
    text = tmp_path / "text.txt"
    text.write_text("the year 1918 and the year 1945. " * 40)
    loop = replace(LOOP, checkpoint_every=1)
    cut_off(train, tmp_path / "out", [Source(text, 1.0)], LLAMA, loop)
    text.write_text("the year 1918 and the year 1946. " * 40)
    with pytest.raises(ConfigError, match=r"other settings: \['text'\]"):
        train(tmp_path / "out", [Source(text, 1.0)], LLAMA, replace(loop, resume=True))


def test_windows_that_are_too_short_for_the_module_are_refused(sources, tmp_path):
    options = replace(SMALL, mtp_steps=3)
    with pytest.raises(ConfigError, match="max_length of at least 5"):
        train(tmp_path / "out", sources, options, replace(LOOP, max_length=4))
    train(tmp_path / "out", sources, options, replace(LOOP, max_length=5, steps=1))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (replace(SMALL, num_layers=1025), CheckpointError, "num_hidden_layers=1025 is not at most"),
        (replace(LLAMA, num_heads=3), UnsupportedError, "3 heads over 32 hidden elements"),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_the_text_is_read(
    tmp_path, options, error, says
):
    with pytest.raises(error, match=says):
        train(tmp_path / "out", [Source(tmp_path / "none", 1.0)], options)
    assert not (tmp_path / "out").exists()


def test_there_is_something_to_resume(sources, tmp_path):
    loop = replace(LOOP, steps=1, warmup_steps=1)
    resumed = replace(loop, resume=True)
    with pytest.raises(ConfigError, match=r"checkpoint\.pt does not exist"):
        train(tmp_path, sources, LLAMA, resumed)
    train(tmp_path, sources, LLAMA, loop)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        train(tmp_path, sources, LLAMA, resumed)


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "gpt"},
        {"architecture": "llama", "mtp_steps": 3},
        {"mtp_steps": -1},
        {"pattern": "MX"},
        {"num_experts_per_tok": 9},
        {"num_experts": 4097},
        {"num_heads": 3},
        {"linear_value_heads": 3, "linear_key_heads": 2},
        {"head_dim": 6},
        {"hidden_size": 0},
        {"vocab_size": 0},
        {"num_heads": 0},
        {"head_dim": 0},
        {"mtp_weight": -1.0},
        {"mtp_weight": float("nan")},
    ],
)
def test_impossible_models_are_refused(changes):
    with pytest.raises(ConfigError, match=r"possible|not known|has no|below 1|cannot share"):
        LMOptions(**changes)


def test_a_vocabulary_without_room_for_every_byte_is_refused_before_the_text_is_read(tmp_path):
    missing, output = [Source(tmp_path / "none.txt", 1.0)], tmp_path / "out"
    with pytest.raises(ConfigError, match=r"vocab_size=258 is too small\. Use at least 259"):
        train(output, missing, replace(SMALL, vocab_size=258))
    assert not output.exists()
    with pytest.raises(ConfigError, match="cannot be read"):
        train(output, missing, replace(SMALL, vocab_size=259))


@pytest.mark.parametrize("share", ["1e100", "1e-320"])
def test_the_extremes_of_shares_train(tmp_path, sources, share):
    extreme = [Source.parse(f"{one.path}={share}") for one in sources]
    train(tmp_path / "out", extreme, LLAMA, replace(LOOP, steps=1, warmup_steps=1))


def test_the_architecture_decides_whether_there_is_a_module():
    options = [LMOptions(architecture=name) for name in ("hybrid", "nemotron_h", "llama")]
    assert [one.module_steps for one in options] == [3, 3, 0]
    assert LMOptions(mtp_steps=0).module_steps == 0


def test_mixed_precision_runs(sources, tmp_path):
    require_mixed_precision(
        lambda name, loop: train(tmp_path / name, sources, NEMOTRON, loop), LOOP
    )


def test_a_model_that_does_not_fit_the_device_is_one_error(sources, tmp_path):
    require_one_error_without_memory(lambda: train(tmp_path, sources, LLAMA), DecoderNetwork, "to")
