from __future__ import annotations

import json
import sys
from functools import partial

import pytest

from helpers.chat_model import write_chat_model
from helpers.cli import invoke
from helpers.http_server import TOY_ENGINE
from sametoken import LLM, SamplingParams

OPTIONS = ["--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "64"]
run = partial(invoke, "batch")


@pytest.fixture
def source(tmp_path):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "model": "toy"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    path = tmp_path / "in.jsonl"
    long = line | {"custom_id": "b", "body": body | {"max_tokens": -1}}
    path.write_text(json.dumps(line) + "\n{\n" + json.dumps(long) + "\n")
    return path


def test_a_file_is_answered_by_an_engine_of_its_own(source, tmp_path):
    model, output = write_chat_model(tmp_path / "model"), tmp_path / "out.jsonl"
    names = ["--model", model, "--served-model-name", "toy"]
    done = run(source, output, *names, *OPTIONS)
    assert done.exit_code == 1, done.output
    assert "1 answered, 0 kept from an earlier run, 2 refused, 0 failed" in done.stderr
    last = json.loads(output.read_text().splitlines()[2])
    assert last["response"]["status_code"] == 400
    result = json.loads(output.read_text().splitlines()[0])
    seed = int(result["id"].removeprefix("batch_req_"), 16) % 2**63
    llm = LLM(str(model), **TOY_ENGINE)
    params = SamplingParams(max_tokens=9, seed=seed)
    (expected,) = llm.chat([{"role": "user", "content": "hi"}], params)
    message = result["response"]["body"]["choices"][0]["message"]
    assert message["content"] == expected.outputs[0].text


def test_options_of_ray_need_ray(source, tmp_path):
    done = run(source, tmp_path / "out", "--replicas", "2")
    assert (done.exit_code, "Add --ray" in done.output) == (2, True)


def test_without_the_extra_ray_is_unsupported(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.data", None)
    done = run(source, tmp_path / "out", "--ray")
    assert (done.exit_code, "sametoken[ray]" in done.output) == (3, True)


def test_a_file_that_is_not_there_is_said(tmp_path):
    done = run(tmp_path / "none", tmp_path / "out")
    assert (done.exit_code, "cannot be read" in done.output) == (2, True)
