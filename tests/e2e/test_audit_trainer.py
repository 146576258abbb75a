"""``sametoken audit --trainer`` names each cause that is planted in log-probabilities."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from helpers.browser import chromium, needs_chromium
from helpers.chat_model import write_chat_model
from helpers.forward import Bench, load
from helpers.parity import BACKENDS
from sametoken import LLM, SamplingParams
from sametoken.audit import trainer_audit
from sametoken.audit.trainer_audit import audit_trainer
from sametoken.audit.trainer_fit import BOTH, EQUAL, STALE, TEMPERATURE, TIES, TOKENS, UNEXPLAINED
from sametoken.audit.trainer_rollouts import scored_by
from sametoken.cli.main import app
from sametoken.config import EngineConfig
from sametoken.errors import CheckpointError, NumericalError, RequestError
from sametoken.text.tokenizer import load_tokenizer

OPTIONS = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 300, "max_model_len": 128}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
CONVERSATIONS = [[{"role": "user", "content": text}] for text in ("ab ab ab", "the end", "1 2 3")]
SEEDS = {"now": 0, "older": 1, "oldest": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of one model, as training leaves them behind."""
    folder = tmp_path_factory.mktemp("steps")
    return {name: write_chat_model(folder / name, seed) for name, seed in SEEDS.items()}


@pytest.fixture(scope="module")
def outputs(models):
    """Sampled with drafts, some of which are accepted."""
    llm = LLM(str(models["now"]), speculative_config=NGRAM, **OPTIONS)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True, logprobs=0)
    outputs = llm.chat(CONVERSATIONS, params)
    assert llm.speculation_metrics.num_accepted_tokens > 0
    return outputs


class Trainer:
    """A forward pass over whole sequences of a checkpoint."""

    def __init__(self, model: Path, temperature: float = 1.0, skipped: int = 0):
        # The engine's kernels: its bits are the same, whatever else differs.
        self.model = load(model, BACKENDS[1])
        self.temperature, self.skipped = temperature, skipped

    def __call__(self, token_ids, prompt_len: int) -> list[float]:
        seen = list(token_ids[self.skipped :])
        logits = Bench(self.model).logits(seen, []) / self.temperature
        following = torch.tensor(seen[1:])[:, None]
        scores = logits[:-1].log_softmax(-1).gather(1, following).squeeze(1)
        return scores[prompt_len - self.skipped - 1 :].tolist()


def with_noise(trainer: Trainer, noise: float):
    draw = random.Random(0)

    def noisy(token_ids, prompt_len) -> list[float]:
        return [min(0.0, one + draw.gauss(0, noise)) for one in trainer(token_ids, prompt_len)]

    return noisy


def rows_of(outputs, trainer, **own) -> list[dict]:
    """Lines of a file, without optional keys except ``own``."""
    return [
        {
            "token_ids": one.token_ids,
            "prompt_length": one.prompt_len,
            "logprobs": one.logprobs,
            **own,
        }
        for one in scored_by(trainer, outputs)
    ]


def audited(tmp_path, models, rows, *arguments: str):
    """The exit code, and what the command says as JSON."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    command = ["audit", str(models["now"]), *FLAGS, "--trainer", str(path), *arguments]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout)


def test_what_the_engine_said_while_it_generated_is_equal(tmp_path, models, outputs):
    said = {}
    for one in outputs:
        (answer,) = one.outputs
        pairs = zip(answer.logprobs, answer.token_ids, strict=True)
        scores = [position[token].logprob for position, token in pairs]
        said[(*one.prompt_token_ids, *answer.token_ids)] = scores
    rows = rows_of(outputs, lambda token_ids, prompt_len: said[token_ids], weight_version=4)
    code, found = audited(tmp_path, models, rows)
    assert (code, found["summary"], found["identical"]) == (0, EQUAL, True)
    (group,) = found["groups"]
    assert group["given"]["num_equal"] == group["given"]["num_tokens"] == 3 * 24
    assert (group["weight_version"], group["num_rollouts"]) == (4, 3)


def test_a_trainer_that_rounds_otherwise_gives_ties(tmp_path, models, outputs):
    exact = Trainer(models["now"])

    def rounded(token_ids, prompt_len):
        return torch.tensor(exact(token_ids, prompt_len)).bfloat16().tolist()

    code, found = audited(tmp_path, models, rows_of(outputs, rounded))
    assert (code, found["summary"]) == (1, TIES)
    (group,) = found["groups"]
    assert 0 < group["given"]["max_abs"] < 0.05
    assert len(group["largest"]) == 5
    assert group["largest"][0]["trainer"] != group["largest"][0]["engine"]


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_stale_weights_are_named(tmp_path, models, outputs, noise):
    trainer = with_noise(Trainer(models["oldest"]), noise)
    others = [f"--checkpoint={models[name]}" for name in ("older", "oldest")]
    code, found = audited(tmp_path, models, rows_of(outputs, trainer), *others)
    assert (code, found["summary"]) == (1, STALE)
    best = found["groups"][0]["best"]
    assert str(models["oldest"]) in best["assumed"]
    assert (best["num_equal"] == best["num_tokens"]) == (noise == 0)


@pytest.mark.parametrize(("used", "said"), [(0.7, 1.0), (1.0, 0.7), (1.43, 1.0)])
def test_a_wrong_temperature_is_estimated(tmp_path, models, outputs, used, said):
    rows = rows_of(outputs, Trainer(models["now"], used), temperature=said)
    code, found = audited(tmp_path, models, rows)
    assert (code, found["summary"]) == (1, TEMPERATURE)
    best = found["groups"][0]["best"]
    assert best["assumed"] == f"at temperature {used:g}"
    assert best["num_equal"] == best["num_tokens"]


def test_the_right_temperature_is_no_difference(tmp_path, models, outputs):
    rows = rows_of(outputs, Trainer(models["now"], 0.7), temperature=0.7)
    assert audited(tmp_path, models, rows)[1]["summary"] == EQUAL


def test_a_first_token_that_the_trainer_left_out_is_found_by_what_fits(tmp_path, models, outputs):
    code, found = audited(tmp_path, models, rows_of(outputs, Trainer(models["now"], skipped=1)))
    assert (code, found["summary"]) == (1, TOKENS)
    assert found["groups"][0]["best"]["assumed"] == "without the first token"


@pytest.mark.parametrize(
    ("spoil", "place", "how"),
    [
        (lambda ids, length: ids[1:], 0, "lacks"),
        (lambda ids, length: [*ids[:3], ids[3], *ids[3:]], 4, "has one more"),
        (lambda ids, length: [*ids[: length - 1], 5, *ids[length:]], -1, "another one"),
    ],
)
def test_a_prompt_that_is_not_the_template_s_is_shown_at_its_first_difference(
    tmp_path, models, outputs, spoil, place, how
):
    trainer, rows = Trainer(models["now"]), []
    for one, messages in zip(scored_by(trainer, outputs), CONVERSATIONS, strict=True):
        ids = spoil(list(one.token_ids), one.prompt_len)
        length = one.prompt_len + len(ids) - len(one.token_ids)
        row = {"token_ids": ids, "prompt_length": length, "messages": messages}
        rows.append(row | {"logprobs": trainer(ids, length)})
    code, found = audited(tmp_path, models, rows)
    assert (code, found["summary"]) == (1, TOKENS)
    assert {group["cause"] for group in found["groups"]} == {EQUAL}
    lengths = [len(output.prompt_token_ids) for output in outputs]
    wanted = [place % length for length in lengths]
    assert [one["position"] for one in found["wrong_tokens"]] == wanted
    assert {one["how"] for one in found["wrong_tokens"]} == {how}


def test_one_token_that_is_off_is_shown_with_both_values(tmp_path, models, outputs):
    rows = rows_of(outputs, Trainer(models["now"]))
    wanted = rows[1]["logprobs"][5]
    rows[1]["logprobs"] = [*rows[1]["logprobs"][:5], wanted - 2, *rows[1]["logprobs"][6:]]
    code, found = audited(tmp_path, models, rows)
    assert (code, found["summary"]) == (1, UNEXPLAINED)
    (shown,) = found["groups"][0]["largest"]
    assert (shown["rollout"], shown["position"]) == ("2", 5)
    assert (shown["trainer"], shown["engine"]) == (wanted - 2, wanted)
    assert shown["token_id"] == rows[1]["token_ids"][rows[1]["prompt_length"] + 5]


def test_a_temperature_is_searched_by_few_tokens_and_compared_over_all(
    tmp_path, models, outputs, monkeypatch
):
    counted, answers = [], trainer_audit.Scorer.answers

    def watched(scorer, rollouts, *arguments):
        counted.append(len(rollouts))
        return answers(scorer, rollouts, *arguments)

    monkeypatch.setattr(trainer_audit, "_SEARCHED_TOKENS", 1)
    monkeypatch.setattr(trainer_audit.Scorer, "answers", watched)
    code, found = audited(tmp_path, models, rows_of(outputs, Trainer(models["now"], 0.8)))
    assert (code, found["summary"]) == (1, TEMPERATURE)
    assert found["groups"][0]["best"]["num_tokens"] == 3 * 24
    assert counted[0] == counted[-1] == 3
    assert counted.count(1) > 20


def test_noise_without_a_cause_is_unexplained(tmp_path, models, outputs):
    draw = random.Random(1)
    rows = rows_of(outputs, lambda ids, length: [-9 * draw.random() for _ in ids[length:]])
    code, found = audited(tmp_path, models, rows, f"--checkpoint={models['older']}")
    assert (code, found["summary"]) == (1, UNEXPLAINED)


def test_each_weight_version_is_explained_alone(tmp_path, models, outputs):
    rows = [
        *rows_of(outputs, Trainer(models["now"]), weight_version=3),
        *rows_of(outputs, Trainer(models["older"]), weight_version=2),
    ]
    code, found = audited(tmp_path, models, rows, f"--checkpoint={models['older']}")
    assert code == 1
    causes = {group["weight_version"]: group["cause"] for group in found["groups"]}
    assert causes == {2: STALE, 3: EQUAL}


def test_the_text_names_cause_evidence_and_remedy(tmp_path, models, outputs):
    path = tmp_path / "rollouts.json"
    path.write_text(json.dumps(rows_of(outputs, Trainer(models["now"], 0.5))))
    command = ["audit", str(models["now"]), *FLAGS, "--trainer", str(path), "--limit", "2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    first, *lines = result.stdout.splitlines()
    assert first == "the trainer against now: wrong temperature"
    assert "2 rollouts, temperature 1: wrong temperature" in lines[0]
    assert "at temperature 0.5 (best): all 48 log-probabilities equal" in result.stdout
    assert "divide the trainer's logits" in lines[-1]


def config(models) -> EngineConfig:
    return EngineConfig.from_options(model=str(models["now"]), **OPTIONS)


def test_a_callback_and_what_does_not_fit_the_context(models, outputs):
    """From Python; tokens past ``max_model_len`` are counted."""
    exact = config(models)
    short = EngineConfig.from_options(model=str(models["now"]), **OPTIONS | {"max_model_len": 48})
    rollouts = scored_by(Trainer(models["now"]), outputs)
    assert [one.weight_version for one in rollouts] == [0, 0, 0]
    assert audit_trainer(exact, rollouts).num_cut == 0
    found = audit_trainer(short, rollouts)
    assert found.identical
    assert found.num_cut == sum(max(0, len(one.token_ids) - 47) for one in rollouts) > 0


def test_a_model_that_gives_nan_is_no_finding(tmp_path, outputs):
    broken = write_chat_model(tmp_path)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    tensors["lm_head.weight"] *= 1e3
    save_file(tensors, broken / "model.safetensors")
    rollouts = scored_by(lambda ids, length: [-1.0] * (len(ids) - length), outputs)
    with pytest.raises(NumericalError, match="NaN"):
        audit_trainer(EngineConfig.from_options(model=str(broken), **OPTIONS), rollouts)


def test_what_cannot_be_compared_is_refused_before_the_model_is_loaded(
    models, outputs, monkeypatch
):
    monkeypatch.setattr(trainer_audit, "build_requested", None)
    (one, *_) = scored_by(Trainer(models["now"]), outputs)
    far = dataclasses.replace(one, token_ids=(*one.token_ids[:-1], 10**6))
    with pytest.raises(RequestError, match="the token id 1000000"):
        audit_trainer(config(models), [far])
    untold = dataclasses.replace(one, messages=tuple(CONVERSATIONS[0]))
    with pytest.raises(RequestError, match="messages need a tokenizer"):
        audit_trainer(config(models), [untold])
    strange = dataclasses.replace(one, messages=({"role": "user", "tool_calls": 5},))
    with pytest.raises(RequestError, match="the chat template refuses"):
        audit_trainer(config(models), [strange], tokenizer=load_tokenizer(models["now"]))
    tiny = EngineConfig.from_options(model=str(models["now"]), **OPTIONS | {"max_model_len": 16})
    with pytest.raises(RequestError, match="a prompt of"):
        audit_trainer(tiny, [one])


def test_a_wrong_checkpoint_is_refused_before_the_model_is_loaded(
    tmp_path, models, outputs, monkeypatch
):
    monkeypatch.setattr(trainer_audit, "build_requested", None)
    rollouts = scored_by(Trainer(models["now"]), outputs)
    with pytest.raises(CheckpointError, match="nowhere is no directory"):
        audit_trainer(config(models), rollouts, checkpoints=[tmp_path / "nowhere"])
    wider = write_chat_model(tmp_path / "wider", hidden_size=32)
    with pytest.raises(CheckpointError, match=r"wider has shape \[\d+, 32\], that of "):
        audit_trainer(config(models), rollouts, checkpoints=[models["older"], wider])


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_two_causes_at_once_are_both_named(tmp_path, models, outputs, noise):
    trainer = with_noise(Trainer(models["older"], 0.7), noise)
    others = [f"--checkpoint={models[name]}" for name in ("oldest", "older")]
    code, found = audited(tmp_path, models, rows_of(outputs, trainer), *others)
    assert (code, found["summary"]) == (1, BOTH)
    best = found["groups"][0]["best"]
    assert best["assumed"].startswith(f"with the weights of {models['older']} at temperature 0.7")
    assert (best["num_equal"] == best["num_tokens"]) == (noise == 0)
    assert {one["cause"] for one in found["groups"][0]["rollouts"]} == {BOTH}


def mixed(models, outputs) -> list[dict]:
    """An equal rollout, one of older weights, and one with a token that is off."""
    now, older = (rows_of(outputs, Trainer(models[name])) for name in ("now", "older"))
    scores = list(now[2]["logprobs"])
    scores[5] -= 2
    return [now[0], older[1], now[2] | {"logprobs": scores}]


def test_each_rollout_has_a_cause_and_its_first_difference(tmp_path, models, outputs):
    rows = mixed(models, outputs)
    (group,) = audited(tmp_path, models, rows, f"--checkpoint={models['older']}")[1]["groups"]
    assert group["cause"] == UNEXPLAINED
    assert [one["cause"] for one in group["rollouts"]] == [EQUAL, STALE, UNEXPLAINED]
    first = [one["first"] for one in group["rollouts"]]
    assert first[0] is None
    for one, row, position in zip(first[1:], rows[1:], (0, 5), strict=True):
        assert one["position"] == position
        assert one["trainer"] == row["logprobs"][position] != one["engine"]
        assert one["token_id"] == row["token_ids"][row["prompt_length"] + position]


@needs_chromium
def test_the_report_works_in_a_browser(tmp_path, models, outputs):
    page_file, errors = tmp_path / "trainer.html", []
    rows = mixed(models, outputs)
    rows[0]["messages"] = CONVERSATIONS[1]
    others = (f"--checkpoint={models['older']}", f"--html={page_file}")
    found = audited(tmp_path, models, rows, *others)[1]
    with chromium() as browser:
        page = browser.new_context(offline=True).new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(page_file.as_uri())
        assert page.inner_text("#verdict") == found["summary"]
        group = found["groups"][0]
        assert page.locator("#assumptions tbody tr").count() == 1 + len(group["others"])
        given = page.locator("#spread tbody tr").first.locator("td").all_inner_texts()
        assert list(map(int, given)) == group["given"]["spread"]
        assert page.locator("#rollouts tbody tr").count() == 3
        page.select_option("#cause", UNEXPLAINED)
        (row,) = page.locator("#rollouts tbody tr").all_inner_texts()
        assert row.split()[:2] == ["3", UNEXPLAINED]
        assert page.locator("#prompts tbody tr").count() == 1
    assert errors == []
