"""Batches: every line is answered once, in order, also by a run that goes on with another's."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from helpers.fake_engine import FakeEngine
from sametoken.config import EngineConfig
from sametoken.errors import (
    ConfigError,
    EngineDeadError,
    EngineRestartingError,
    NumericalError,
    OverloadedError,
    RequestError,
)
from sametoken.serving.adapters import ServedAdapters
from sametoken.serving.batch import run as module
from sametoken.serving.batch.config import BatchConfig
from sametoken.serving.batch.lines import InputLine
from sametoken.serving.batch.run import BatchSummary, answers_of, batch_server_config, run_batch
from sametoken.serving.http.app import create_app
from sametoken.serving.http.errors import as_api_error
from sametoken.types.lora_modules import AdapterNames

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
        self.errors: dict[str, Exception] = {}

    def begin(self, request):
        if request.prompt.text == self.fatal:
            raise KeyboardInterrupt
        if request.prompt.text in self.errors:
            raise self.errors[request.prompt.text]
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


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


def write(path: Path, numbers, text: str = "p{}") -> Path:
    path.write_bytes(b"".join(line(i, prompt=text.format(i)).raw + b"\n" for i in numbers))
    return path


def results(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(path: Path) -> dict[str, str]:
    return {
        one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in results(path)
    }


def interrupt(engine: Engine, source: Path, output: Path, at: str = "p8") -> None:
    """Begin a run whose process dies at a prompt."""
    engine.fatal = at
    with pytest.raises(KeyboardInterrupt):
        run_batch(CONFIG, source, output, BATCH)
    engine.fatal = ""
    engine.prompts.clear()


EXPECTED = {f"c{i}": f"re p{i}" for i in range(NUM_LINES)}


def test_every_line_is_answered_in_order(engine, source, output, tmp_path):
    assert run_batch(CONFIG, source, output, BATCH) == BatchSummary(NUM_LINES, 0, 0)
    assert texts(output) == EXPECTED
    assert list(texts(output)) == list(EXPECTED)
    assert sorted(engine.prompts) == [f"p{i}" for i in range(NUM_LINES)]
    assert engine.is_shut_down
    assert sorted(tmp_path.iterdir()) == [source, output]


def test_a_run_that_ended_goes_on_with_what_is_left(engine, source, output, tmp_path):
    parts = tmp_path / "out.jsonl.parts"
    interrupt(engine, source, output, at="p6")
    assert not output.exists()
    first = parts / "part-00000.jsonl"
    recorded = first.read_bytes().splitlines(keepends=True)
    assert 2 <= len(recorded) < NUM_LINES
    # The last write of a process that is killed may be cut anywhere.
    first.write_bytes(b"".join(recorded)[:-7])

    kept = len(recorded) - 1
    summary = run_batch(CONFIG, source, output, BATCH)
    assert summary == BatchSummary(NUM_LINES - kept, kept, 0)
    assert len(engine.prompts) == NUM_LINES - kept
    assert list(texts(output).items()) == list(EXPECTED.items())
    assert not parts.exists()


def test_a_line_that_was_changed_is_answered_anew(engine, source, output):
    interrupt(engine, source, output)
    write(source, reversed(range(NUM_LINES)), "q{}")
    assert run_batch(CONFIG, source, output, BATCH).num_kept == 0
    assert list(texts(output).items()) == [
        (f"c{i}", f"re q{i}") for i in reversed(range(NUM_LINES))
    ]


@pytest.mark.parametrize(
    ("option", "other", "held"),
    [
        ("model", "other", "'toy'"),
        ("kv_cache_dtype", "fp8", "'auto'"),
        ("logprobs_mode", "processed_logprobs", "'raw_logprobs'"),
        ("enable_return_routed_experts", True, "False"),
        ("lora_modules", {"sql": "./a"}, r"\[\]"),
    ],
)
def test_a_run_may_go_on_with_another_drafter_but_not_with_other_results(
    engine, source, output, option, other, held
):
    interrupt(engine, source, output)
    with pytest.raises(ConfigError, match=f"{option}={held}"):
        run_batch(dataclasses.replace(CONFIG, **{option: other}), source, output, BATCH)
    with pytest.raises(ConfigError, match=r"served_model_name=\['toy'\]"):
        run_batch(CONFIG, source, output, dataclasses.replace(BATCH, served_model_name=("b",)))
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    config = EngineConfig.from_options(model="toy", device="cpu", speculative_config=ngram)
    assert run_batch(config, source, output, BATCH).num_kept > 0


def test_lines_that_are_no_requests_stand_in_their_place(engine, source, output):
    source.write_text("{\n" + source.read_text() + '\n{"custom_id": "x"}\n')
    assert run_batch(CONFIG, source, output, BATCH) == BatchSummary(NUM_LINES, 0, 2)
    first, *_, last = results(output)
    assert (first["error"]["code"], first["custom_id"]) == ("invalid_json", None)
    assert (last["error"]["code"], last["custom_id"]) == ("invalid_request", "x")


def test_an_error_for_an_answer_is_no_answer(engine, source, output):
    engine.errors = {"p1": RequestError("too long", "shorten it"), "p2": NumericalError("NaN")}
    interrupt(engine, source, output)
    summary = run_batch(CONFIG, source, output, BATCH)
    assert (summary.num_refused, summary.num_failed) == (1, 1)
    assert summary.num_answered == len(engine.prompts)
    assert summary.num_kept == NUM_LINES - 2 - len(engine.prompts) > 0
    responses = [one["response"] for one in results(output)]
    assert [one["status_code"] for one in responses[:4]] == [200, 400, 500, 200]


def test_nothing_to_do_needs_no_engine(source, output, monkeypatch):
    monkeypatch.setattr(module.AsyncLLM, "start", None)
    source.write_text("\n")
    assert run_batch(CONFIG, source, output, BATCH) == BatchSummary(0, 0, 0)
    assert output.read_bytes() == b""


@pytest.mark.parametrize(
    ("body", "batch", "status", "message"),
    [
        ({"model": "other"}, BATCH, 404, "the model 'other' does not exist. Use 'toy'"),
        ({"model": "toy"}, BatchConfig(("a", "b")), 404, "Use 'a' or 'b'"),
        ({"stream": True}, BATCH, 400, "a batch has no streams. Leave stream out"),
    ],
)
def test_lines_that_no_engine_would_serve_need_none(
    source, output, monkeypatch, body, batch, status, message
):
    monkeypatch.setattr(module.AsyncLLM, "start", None)
    lines = results(source)
    changed = [json.dumps(one | {"body": one["body"] | body}) + "\n" for one in lines]
    source.write_text("".join(changed))
    assert run_batch(CONFIG, source, output, batch) == BatchSummary(0, 0, NUM_LINES)
    for result, one in zip(results(output), lines, strict=True):
        response = result["response"]
        assert result["custom_id"] == one["custom_id"]
        assert response["status_code"] == status
        assert message in response["body"]["error"]["message"]


def test_a_line_names_its_adapter_as_the_model(engine, source, output):
    config = dataclasses.replace(CONFIG, lora_modules={"sql": "./a"})
    engine.adapters = ServedAdapters(AdapterNames(config.lora_modules), engine.command)
    first, second, *_ = results(source)
    first["body"]["model"], second["body"]["model"] = "sql", "other"
    source.write_text("\n".join(map(json.dumps, (first, second))) + "\n")
    assert run_batch(config, source, output, BATCH) == BatchSummary(1, 0, 1)
    bodies = [one["response"]["body"] for one in results(output)]
    assert (bodies[0]["model"], engine.chosen) == ("sql", ["sql"])
    assert "the model 'other' does not exist. Use 'toy' or 'sql'" in bodies[1]["error"]["message"]


def test_an_adapter_with_a_name_of_the_model_is_refused_before_anything_is_written(
    source, output, tmp_path
):
    config = dataclasses.replace(CONFIG, lora_modules={"toy": "./a"})
    with pytest.raises(ConfigError, match="lora_modules has 'toy', which is a name of the model"):
        run_batch(config, source, output, BATCH)
    assert list(tmp_path.iterdir()) == [source]


def test_lines_for_another_model_stand_beside_answers_and_leave_no_parts(
    engine, source, output, tmp_path, monkeypatch
):
    first, *others = source.read_text().splitlines()
    other = json.loads(first)
    other["body"]["model"] = "other"
    source.write_text("\n".join([json.dumps(other), *others]) + "\n")
    start = module.AsyncLLM.start

    async def fail(config, limits):
        raise ConfigError("no memory", "use less")

    monkeypatch.setattr(module.AsyncLLM, "start", fail)
    with pytest.raises(ConfigError, match="no memory"):
        run_batch(CONFIG, source, output, BATCH)
    assert sorted(tmp_path.iterdir()) == [source]
    monkeypatch.setattr(module.AsyncLLM, "start", start)
    assert run_batch(CONFIG, source, output, BATCH) == BatchSummary(NUM_LINES - 1, 0, 1)
    assert sorted(engine.prompts) == [f"p{i}" for i in range(1, NUM_LINES)]


def test_an_output_that_is_there_is_not_touched(engine, source, output, tmp_path):
    output.write_text("mine")
    with pytest.raises(ConfigError, match="there already"):
        run_batch(CONFIG, source, output, BATCH)
    assert output.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [source, output]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(module, "_RETRY_S", 0.0)


def line(number: int, url: str = "/v1/completions", **body) -> InputLine:
    fields = {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}
    return InputLine(number, json.dumps(fields).encode())


def answered(engine: FakeEngine, lines: list[InputLine], concurrency: int = 4) -> dict[str, dict]:
    async def main():
        app = create_app(engine, batch_server_config(("toy",)))
        groups = [group async for group in answers_of(app, lines, concurrency)]
        return [answer for group in groups for answer in group]

    pairs = asyncio.run(main())
    assert sorted(key for key, _ in pairs) == sorted(one.key for one in lines)
    found = [json.loads(result) for _, result in pairs]
    return {result["custom_id"]: result for result in found}


def test_lines_get_what_the_server_answers(serve):
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "toy", "logprobs": True}
    lines = [line(1, prompt="a", model="toy"), line(2, "/v1/chat/completions", **chat)]
    found = answered(FakeEngine("hello"), lines)
    client = serve(served_model_name=("toy",))
    for name, url, body in (
        ("c1", "/v1/completions", {"prompt": "a"}),
        ("c2", "/v1/chat/completions", chat),
    ):
        response = found[name]["response"]
        assert (response["status_code"], found[name]["error"]) == (200, None)
        assert response["request_id"] == response["body"]["id"]
        assert response["body"]["choices"] == client.post(url, json=body).json()["choices"]


def test_a_request_that_the_endpoint_refuses_has_its_answer_as_response():
    bad = [line(1, prompt=3), line(2), line(3, prompt="a", model="no"), line(4, prompt="a", n=0)]
    found = answered(FakeEngine(), bad)
    statuses = {name: one["response"]["status_code"] for name, one in found.items()}
    assert statuses == {"c1": 400, "c2": 400, "c3": 404, "c4": 400}
    assert all(one["response"]["body"]["error"]["message"] for one in found.values())


async def test_no_more_lines_run_at_once_than_allowed_and_all_places_are_used():
    running = most = 0

    async def app(scope, receive, send):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    lines = [line(i) for i in range(11)]
    assert sum([len(group) async for group in answers_of(app, lines, 4)]) == 11
    assert most == 4


def test_seeds_depend_on_the_line_alone():
    engine = FakeEngine()
    given = [line(3, prompt="a", seed=5), line(4, prompt="a", seed=0)]
    answered(engine, [line(1, prompt="a"), line(2, prompt="a"), *given], 1)
    again = FakeEngine()
    answered(again, [line(2, prompt="a"), line(1, prompt="a")], 1)
    seeds = [params.seed for _, params in engine.seen]
    assert seeds[2:] == [5, 0]
    assert len(set(seeds)) == 4
    assert [params.seed for _, params in again.seen] == [seeds[1], seeds[0]]


@pytest.mark.parametrize(
    ("trouble", "times"),
    [
        (EngineDeadError("gone"), 4),
        (EngineRestartingError("soon"), 9),
        (OverloadedError("too many wait"), 9),
    ],
)
def test_passing_trouble_is_waited_out(trouble, times):
    class Troubled(FakeEngine):
        left = times

        def begin(self, *arguments):
            self.left -= 1
            if self.left >= 0:
                raise trouble
            return super().begin(*arguments)

    found = answered(Troubled(), [line(1, prompt="a")])
    assert found["c1"]["response"]["status_code"] == 200


def test_an_engine_that_is_gone_for_good_ends_the_run():
    with pytest.raises(EngineDeadError, match="The same command resumes the run"):
        answered(FakeEngine(refuse=EngineDeadError("gone")), [line(1, prompt="a")])


async def test_lines_that_run_end_with_the_run():
    ended = []

    async def app(scope, receive, send):
        body = json.loads((await receive())["body"])
        if body["prompt"] == "a":
            error = EngineDeadError("gone")
            await as_api_error(error).response(scope["path"])(scope, receive, send)
            return
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(body["prompt"])

    groups = answers_of(app, [line(1, prompt="a"), line(2, prompt="b")], 2)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(anext(groups), 10)
    assert ended == ["b"]


def test_a_failed_request_fails_alone():
    found = answered(FakeEngine(failed=True), [line(1, prompt="a")])
    assert found["c1"]["response"]["status_code"] == 500
