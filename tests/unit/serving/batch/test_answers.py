from __future__ import annotations

import asyncio
import json

import pytest

from helpers.fake_engine import FakeEngine
from sametoken.errors import EngineDeadError, EngineRestartingError, OverloadedError
from sametoken.serving.batch import run as module
from sametoken.serving.batch.lines import InputLine
from sametoken.serving.batch.run import answers_of, batch_server_config
from sametoken.serving.http.app import create_app


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
    results = [json.loads(result) for _, result in pairs]
    return {result["custom_id"]: result for result in results}


def test_lines_get_what_the_server_answers(serve):
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "toy", "logprobs": True}
    lines = [line(1, prompt="a", model="toy"), line(2, "/v1/chat/completions", **chat)]
    found = answered(FakeEngine("hello"), lines)
    client = serve(FakeEngine("hello"), served_model_name=("toy",))
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
    found = answered(FakeEngine(), [*bad, line(5, prompt="a", stream=True)])
    statuses = {name: one["response"]["status_code"] for name, one in found.items()}
    assert statuses == {"c1": 400, "c2": 400, "c3": 404, "c4": 400, "c5": 400}
    assert all(one["response"]["body"]["error"]["message"] for one in found.values())
    assert found["c5"]["response"]["body"]["error"]["param"] == "stream"


def test_no_more_lines_run_at_once_than_allowed_and_all_places_are_used():
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

    async def main():
        lines = [line(i) for i in range(11)]
        return [len(group) async for group in answers_of(app, lines, 4)]

    assert sum(asyncio.run(main())) == 11
    assert most == 4


def test_seeds_depend_on_the_line_alone():
    engine = FakeEngine()
    answered(engine, [line(1, prompt="a"), line(2, prompt="a"), line(3, prompt="a", seed=5)], 1)
    again = FakeEngine()
    answered(again, [line(2, prompt="a"), line(1, prompt="a")], 1)
    seeds = [params.seed for _, params in engine.seen]
    assert seeds[2] == 5
    assert len(set(seeds)) == 3
    assert [params.seed for _, params in again.seen] == [seeds[1], seeds[0]]


@pytest.mark.parametrize(
    "trouble",
    [EngineDeadError("gone"), EngineRestartingError("soon"), OverloadedError("too many wait")],
)
def test_passing_trouble_is_waited_out(trouble):
    class Troubled(FakeEngine):
        def begin(self, *arguments):
            self.refuse, former = None, self.refuse
            if former is not None:
                raise former
            return super().begin(*arguments)

    found = answered(Troubled(refuse=trouble), [line(1, prompt="a")])
    assert found["c1"]["response"]["status_code"] == 200


def test_an_engine_that_is_gone_for_good_ends_the_run():
    with pytest.raises(EngineDeadError, match="goes on with what is left"):
        answered(FakeEngine(refuse=EngineDeadError("gone")), [line(1, prompt="a")])


def test_a_poisoned_request_fails_alone():
    found = answered(FakeEngine(failed=True), [line(1, prompt="a")])
    assert found["c1"]["response"]["status_code"] == 500
