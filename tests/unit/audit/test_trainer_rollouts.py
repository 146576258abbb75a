"""Files of rollouts: what is taken, and what is refused by name."""

from __future__ import annotations

import gzip
import json

import pytest

from sametoken.audit import trainer_rollouts
from sametoken.audit.trainer_rollouts import ScoredRollout, read_rollouts, scored_by
from sametoken.errors import ConfigError
from sametoken.types.outputs import CompletionOutput, RequestMetrics, RequestOutput

ROW = {"token_ids": [4, 5, 6], "prompt_length": 1, "logprobs": [-0.5, 0]}


def written(tmp_path, *rows, name: str = "rollouts.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_lines_become_rollouts(tmp_path):
    whole = {"id": "x", "temperature": 0.7, "weight_version": 3, "messages": [{"role": "user"}]}
    one, other = read_rollouts(written(tmp_path, ROW, ROW | whole))
    assert one == ScoredRollout("1", (4, 5, 6), 1, (-0.5, 0.0))
    assert other == ScoredRollout("'x'", (4, 5, 6), 1, (-0.5, 0.0), 0.7, 3, ({"role": "user"},))


def test_a_list_and_compressed_lines_are_read_as_well(tmp_path):
    wanted = read_rollouts(written(tmp_path, ROW, ROW))
    assert read_rollouts(written(tmp_path, [ROW, ROW], name="all.json")) == wanted
    packed = tmp_path / "rollouts.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(ROW).encode()))
    assert read_rollouts(packed) == wanted[:1]


def test_what_is_past_the_limit_is_not_read(tmp_path):
    path = written(tmp_path, ROW, ROW, {"broken": True})
    assert len(read_rollouts(path, limit=2)) == 2
    with pytest.raises(ConfigError, match="rollout 3 has the unknown key 'broken'"):
        read_rollouts(path)


def test_tokens_in_memory_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_rollouts, "MAX_TOKENS", 6)
    assert len(read_rollouts(written(tmp_path, ROW, ROW))) == 2
    with pytest.raises(ConfigError, match="more than 6 tokens in its first 3 rollouts"):
        read_rollouts(written(tmp_path, ROW, ROW, ROW))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"token_ids": "4 5"}, "token_ids='4 5'"),
        ({"token_ids": []}, r"token_ids=\[\]"),
        ({"token_ids": [4, -5, 6]}, "token_ids="),
        ({"token_ids": [4, 5.0, 6]}, "token_ids="),
        ({"token_ids": [4, True, 6]}, "token_ids="),
        ({"token_ids": [4, 2**31, 6]}, "token_ids="),
        ({"token_ids": [4]}, "prompt_length=1. Give an integer from 1 to 0"),
        ({"prompt_length": 0}, "prompt_length=0. Give an integer from 1 to 2"),
        ({"prompt_length": 3}, "prompt_length=3"),
        ({"prompt_length": None}, "prompt_length=None"),
        ({"prompt_length": 10**4000}, "prompt_length=an integer of"),
        ({"logprobs": [-0.5]}, "1 logprobs for 2 tokens"),
        ({"logprobs": [-0.5, 0.4]}, "logprobs="),
        ({"logprobs": [-0.5, -(10**400)]}, "logprobs="),
        ({"logprobs": [-1.7e308, -1.7e308]}, "logprobs="),
        ({"logprobs": [-0.5, None]}, "logprobs="),
        ({"logprobs": [-0.5, "0"]}, "logprobs="),
        ({"temperature": 0}, "temperature=0"),
        ({"temperature": 1e9}, "temperature=1000000000.0"),
        ({"temperature": True}, "temperature=True"),
        ({"weight_version": -1}, "weight_version=-1"),
        ({"weight_version": "3"}, "weight_version='3'"),
        ({"messages": "hello"}, "messages='hello'"),
        ({"messages": ["hello"]}, r"messages=\['hello'\]"),
        ({"temprature": 0.7}, "unknown key 'temprature'"),
    ],
)
def test_a_broken_rollout_is_named_by_its_key(tmp_path, change, why):
    with pytest.raises(ConfigError, match=f"rollout 2 has .*{why}") as caught:
        read_rollouts(written(tmp_path, ROW, ROW | change))
    assert caught.value.remedy


@pytest.mark.parametrize("key", ["token_ids", "prompt_length", "logprobs"])
def test_a_key_that_is_missing_is_named(tmp_path, key):
    row = {name: value for name, value in ROW.items() if name != key}
    with pytest.raises(ConfigError, match=f"rollout 1 has no {key}"):
        read_rollouts(written(tmp_path, row))


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("", "a.jsonl", "holds no rollouts"),
        ("[]", "a.json", "holds no rollouts"),
        ("{}", "a.json", "is no list"),
        ("[", "a.json", "cannot be read"),
        ("[4, 5]", "a.jsonl", "rollout 1 is no object"),
        ('{"logprobs": [-Infinity]}', "a.jsonl", "is not JSON"),
        ("[" * 500, "a.jsonl", "is not JSON"),
        ("\x1f", "a.jsonl.gz", "cannot be read"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, text, name, why):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_rollouts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rollouts(tmp_path / "absent.json")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_line_or_a_list_without_end_is_not_held(tmp_path, monkeypatch, name):
    monkeypatch.setattr("sametoken.io.json_text.MAX_LINE_BYTES", 100)
    monkeypatch.setattr("sametoken.io.files.MAX_JSON_BYTES", 100)
    path = tmp_path / name
    path.write_text(json.dumps([ROW] * 20))
    with pytest.raises(ConfigError, match="100 bytes"):
        read_rollouts(path)


def output(request_id: str, answers, versions=(2, 2)) -> RequestOutput:
    return RequestOutput(
        request_id,
        None,
        (4, 5),
        tuple(CompletionOutput(i, "", ids) for i, ids in enumerate(answers)),
        finished=True,
        metrics=RequestMetrics(0.0),
        weight_versions=versions,
    )


def test_a_callback_scores_every_completion():
    seen = []

    def trainer(token_ids, prompt_len):
        seen.append(token_ids)
        return [-float(token) for token in token_ids[prompt_len:]]

    outputs = [output("a", [(6,), (7, 8)]), output("b", [(), (9,)], versions=(1, 2))]
    rollouts = scored_by(trainer, outputs, temperature=0.5)
    assert seen == [(4, 5, 6), (4, 5, 7, 8), (4, 5, 9)]
    assert rollouts == (
        ScoredRollout("a/0", (4, 5, 6), 2, (-6.0,), 0.5, 2),
        ScoredRollout("a/1", (4, 5, 7, 8), 2, (-7.0, -8.0), 0.5, 2),
        ScoredRollout("b/1", (4, 5, 9), 2, (-9.0,), 0.5, None),
    )


def test_a_callback_that_gives_another_number_is_refused():
    with pytest.raises(ConfigError, match="the trainer, request a has 3 logprobs for 1 tokens"):
        scored_by(lambda token_ids, prompt_len: [-1.0] * 3, [output("a", [(6,)])])
