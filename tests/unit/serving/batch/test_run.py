from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.fake_engine import FakeEngine
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError
from sametoken.serving.batch import run as module
from sametoken.serving.batch.config import BatchConfig
from sametoken.serving.batch.run import BatchSummary, run_batch

CONFIG = EngineConfig(model="toy", device="cpu")
BATCH = BatchConfig(("toy",), concurrency=3)
NUM_LINES = 9


class Engine(FakeEngine):
    """Counts prompts, and stands for a process that dies at one of them."""

    fatal = ""

    def __init__(self) -> None:
        super().__init__(lambda prompt, index: f"re {prompt}")
        self.prompts: list[str] = []
        self.is_shut_down = False

    def begin(self, request):
        if request.prompt.text == self.fatal:
            raise KeyboardInterrupt
        self.prompts.append(request.prompt.text)
        return super().begin(request)

    async def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def engine(monkeypatch) -> Engine:
    made = Engine()

    async def start(config, limits):
        made.limits = limits
        return made

    monkeypatch.setattr(module.AsyncLLM, "start", start)
    return made


@pytest.fixture
def source(tmp_path) -> Path:
    return write(tmp_path / "in.jsonl", range(NUM_LINES))


def write(path: Path, numbers, text: str = "p{}") -> Path:
    lines = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": text.format(i)},
        }
        for i in numbers
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def texts(path: Path) -> dict[str, str]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in results}


EXPECTED = {f"c{i}": f"re p{i}" for i in range(NUM_LINES)}


def test_every_line_is_answered_in_order(engine, source, tmp_path):
    output = tmp_path / "out.jsonl"
    assert run_batch(CONFIG, source, output, BATCH) == BatchSummary(NUM_LINES, 0, 0)
    assert texts(output) == EXPECTED
    assert list(texts(output)) == list(EXPECTED)
    assert sorted(engine.prompts) == [f"p{i}" for i in range(NUM_LINES)]
    assert engine.is_shut_down
    assert sorted(tmp_path.iterdir()) == [source, output]


def test_a_run_that_ended_goes_on_with_what_is_left(engine, source, tmp_path):
    output, parts = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    engine.fatal = "p6"
    with pytest.raises(KeyboardInterrupt):
        run_batch(CONFIG, source, output, BATCH)
    assert not output.exists()
    first = parts / "part-00000.jsonl"
    recorded = first.read_bytes().splitlines(keepends=True)
    assert 2 <= len(recorded) < NUM_LINES
    # The last write of a process that is killed may be cut anywhere.
    first.write_bytes(b"".join(recorded)[:-7])

    engine.fatal = ""
    engine.prompts.clear()
    kept = len(recorded) - 1
    summary = run_batch(CONFIG, source, output, BATCH)
    assert summary == BatchSummary(NUM_LINES - kept, kept, 0)
    assert len(engine.prompts) == NUM_LINES - kept
    assert list(texts(output).items()) == list(EXPECTED.items())
    assert not parts.exists()


def test_a_line_that_was_changed_is_answered_anew(engine, source, tmp_path):
    output = tmp_path / "out.jsonl"
    engine.fatal = "p8"
    with pytest.raises(KeyboardInterrupt):
        run_batch(CONFIG, source, output, BATCH)
    write(source, reversed(range(NUM_LINES)), "q{}")
    engine.prompts.clear()
    assert run_batch(CONFIG, source, output, BATCH).num_kept == 0
    assert list(texts(output).items()) == [
        (f"c{i}", f"re q{i}") for i in reversed(range(NUM_LINES))
    ]


def test_a_run_may_go_on_with_another_drafter_but_not_with_another_model(engine, source, tmp_path):
    output = tmp_path / "out.jsonl"
    engine.fatal = "p8"
    with pytest.raises(KeyboardInterrupt):
        run_batch(CONFIG, source, output, BATCH)
    engine.fatal = ""
    with pytest.raises(ConfigError, match="model='toy'"):
        run_batch(EngineConfig(model="other", device="cpu"), source, output, BATCH)
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    config = EngineConfig.from_options(model="toy", device="cpu", speculative_config=ngram)
    assert run_batch(config, source, output, BATCH).num_kept > 0


def test_lines_that_are_no_requests_stand_in_their_place(engine, source, tmp_path):
    source.write_text("{\n" + source.read_text() + '\n{"custom_id": "x"}\n')
    output = tmp_path / "out.jsonl"
    assert run_batch(CONFIG, source, output, BATCH) == BatchSummary(NUM_LINES, 0, 2)
    first, *_, last = [json.loads(line) for line in output.read_text().splitlines()]
    assert (first["error"]["code"], first["custom_id"]) == ("invalid_json", None)
    assert (last["error"]["code"], last["custom_id"]) == ("invalid_request", "x")


def test_nothing_to_do_needs_no_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(module.AsyncLLM, "start", None)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n")
    assert run_batch(CONFIG, source, output, BATCH) == BatchSummary(0, 0, 0)
    assert output.read_bytes() == b""


def test_an_output_that_is_there_is_not_touched(engine, source, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(ConfigError, match="there already"):
        run_batch(CONFIG, source, output, BATCH)
    assert output.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [source, output]
