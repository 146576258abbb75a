"""Whatever a client sends gets an answer or a refusal, in time, and nobody else feels it.

Both processes of a real server are measured. ``SAMETOKEN_FUZZ_EXAMPLES`` (of each kind) and
``SAMETOKEN_FUZZ_SEED`` make longer and other runs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st

from helpers.chat_model import write_chat_model
from helpers.hostile import REGEXES, SCHEMAS, STOPS, grammars
from helpers.scripts import imported
from sametoken import LLM, SamplingParams

NUM_EXAMPLES = int(os.environ.get("SAMETOKEN_FUZZ_EXAMPLES", "16"))
#: Ten times what is measured on two busy cores, or what grammars are allowed. Such requests have
#: taken a minute, stopped everybody for as long, and left gigabytes.
ANSWER_S, HEALTH_S, GROWTH_MIB = 60.0, 5.0, 400.0
MESSAGE_LENGTH = 2000
STATUSES = {200, 400, 404, 408, 413, 422, 429, 503}
WITH_RETRY_AFTER = {429, 503}
KNOWN = {"prompt": [1, 2, 3, 1, 2], "max_tokens": 12, "temperature": 0.0, "return_token_ids": True}


def fuzzed(function):
    """Examples that are the same in every run."""
    chosen = settings(
        max_examples=NUM_EXAMPLES,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return seed(int(os.environ.get("SAMETOKEN_FUZZ_SEED", "0")))(chosen(function))


class Pulse:
    """Asks ``/health`` all the while."""

    def __init__(self, address: str) -> None:
        self.slowest_s = 0.0
        self.statuses: set[int] = set()
        self._address = address
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    @contextlib.contextmanager
    def beating(self) -> Iterator[Pulse]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            self._thread.join()

    def _beat(self) -> None:
        client = http.client.HTTPConnection(self._address, timeout=120)
        while not self._stopped.wait(0.02):
            began = time.monotonic()
            client.request("GET", "/health")
            response = client.getresponse()
            response.read()
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.statuses.add(response.status)


class Target:
    """A server under fire.

    Args:
        server: its processes.
        address: host and port.
    """

    def __init__(self, server: Any, address: str) -> None:
        self.server = server
        self.address = address

    def post(self, path: str, content: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, and body."""
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=120)) as client:
            client.request("POST", path, content, {"Content-Type": "application/json"})
            response = client.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, headers, response.read()

    def attack(self, path: str, content: bytes) -> None:
        """Send a body; assert that the answer is one of those allowed, and in time."""
        began = time.monotonic()
        status, headers, body = self.post(path, content)
        seconds = time.monotonic() - began
        sent = (path, content[:1000])
        assert seconds < ANSWER_S, (seconds, sent)
        assert status in STATUSES, (status, body, sent)
        if status == 200:
            check_success(headers["content-type"], body, sent)
        else:
            check_error(json.loads(body), sent)
            assert status not in WITH_RETRY_AFTER or int(headers["retry-after"]) > 0, sent


def check_success(content_type: str, body: bytes, sent: object) -> None:
    """JSON, or events to the last, of which an error is the client's."""
    if not content_type.startswith("text/event-stream"):
        assert isinstance(json.loads(body), dict), (body, sent)
        return
    *events, done = body.decode().split("\n\n")[:-1]
    assert done == "data: [DONE]", (body[-300:], sent)
    for event in events:
        error = json.loads(event.removeprefix("data: "))
        if "error" in error:
            check_error(error, sent)
            assert error["error"]["type"] != "server_error", (event, sent)


def check_error(answer: dict[str, Any], sent: object) -> None:
    """OpenAI's shape, and a message that fits a log."""
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}, (answer, sent)
    assert 0 < len(error["message"]) < MESSAGE_LENGTH, (error["message"][:300], sent)


@pytest.fixture(scope="module")
def stress() -> Iterator[SimpleNamespace]:
    with imported("stress", "server", "bombs") as modules:
        yield modules


@pytest.fixture(scope="module")
def target(stress, tmp_path_factory) -> Iterator[Target]:
    model = str(write_chat_model(tmp_path_factory.mktemp("fuzzed") / "model"))
    params = {name: KNOWN[name] for name in ("max_tokens", "temperature")}
    (known,) = LLM(model, **stress.server.ENGINE).generate(
        {"prompt_token_ids": KNOWN["prompt"]}, SamplingParams(**params)
    )
    with stress.server.serving(model) as server:
        target = Target(server, server.wait_for_url().removeprefix("http://"))
        # Processes and libraries for grammars start with the first one.
        target.attack(*completion(guided_regex="a+"))
        engine_pid, before = server.engine_pid(), server.sample()
        with Pulse(target.address).beating() as pulse:
            yield target
        _, _, body = target.post("/v1/completions", json.dumps(KNOWN).encode())
        after = server.sample()
        assert json.loads(body)["choices"][0]["token_ids"] == list(known.outputs[0].token_ids)
        assert server.engine_pid() == engine_pid
        assert (pulse.statuses, pulse.slowest_s < HEALTH_S) == ({200}, True), pulse.slowest_s
        for name in ("server_mib", "engine_mib", "others_mib"):
            assert after[name] < before[name] + GROWTH_MIB, (name, before[name], after[name])
        assert "Traceback" not in server.log


def completion(**fields: Any) -> tuple[str, bytes]:
    body = {"prompt": "the inner", "max_tokens": 24, **fields}
    return "/v1/completions", json.dumps(body).encode()


@fuzzed
@given(number=st.integers(0, 2**64))
def test_bodies(target, stress, number):
    target.attack(*stress.bombs.mutation(random.Random(number)))


@fuzzed
@given(schema=SCHEMAS, stream=st.booleans())
def test_schemas(target, schema, stream):
    target.attack(*completion(guided_json=schema, stream=stream))


@fuzzed
@example(grammar="root ::= root{2}", stream=False)
@example(grammar='root ::= root root root | "a" | "b" | ""', stream=True)
@given(grammar=grammars(), stream=st.booleans())
def test_grammars(target, grammar, stream):
    target.attack(*completion(guided_grammar=grammar, stream=stream))


@fuzzed
@given(regex=REGEXES, stream=st.booleans())
def test_regexes(target, regex, stream):
    target.attack(*completion(guided_regex=regex, stream=stream))


@fuzzed
@given(stop=STOPS, bad_words=STOPS, min_tokens=st.integers(0, 30), kept=st.booleans())
def test_stops(target, stop, bad_words, min_tokens, kept):
    fields = {"min_tokens": min_tokens, "include_stop_str_in_output": kept, "n": 2}
    target.attack(*completion(stop=stop, bad_words=bad_words, stream=True, **fields))
