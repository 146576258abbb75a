"""``sametoken serve`` as a process: vLLM's command line, and signals."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from helpers.calculator import MAX_TOKENS, PROMPT
from helpers.chat_model import save_tokenizer, vocab_size
from helpers.hybrids import write_hybrid

#: Both commands of vllm#39273, with our name in place of vLLM's.
NAME = "morphllm/fast-apply-v4-axolotl-fp8"
PLAIN = f"""sametoken serve {NAME} \\
  --trust-remote-code \\
  --enforce-eager \\
  --enable-chunked-prefill \\
  --max-model-len 131072 \\
  --max-num-batched-tokens 131072 \\
  --additional-config '{{"gdn_prefill_backend": "triton"}}'
"""
NGRAM = (
    PLAIN.rstrip()
    + """ \\
  --speculative-config '{"method":"ngram","num_speculative_tokens":64,\
"prompt_lookup_max":10,"prompt_lookup_min":2}'
"""
)
REQUEST = {"model": NAME, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
#: Ports are the system's choice, and a toy needs no gigabyte.
TEST_OPTIONS = "--port 0 --device cpu --num-kv-blocks 9000"
#: A busy machine starts a server in minutes.
PATIENCE_S = 600


class Command:
    """A server that was started by a command line."""

    def __init__(self, directory: Path, line: str) -> None:
        words = shlex.split(line.replace("\\\n", " "))
        assert words[0] == "sametoken"
        self.log = directory / f"{len(words)}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sametoken", *words[1:]],
                cwd=directory,
                stderr=log,
                stdout=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def url(self) -> str:
        """Where it listens, once it does."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if "Application startup complete" in self.log.read_text():
                return re.search(r"at (http://\S+)", self.log.read_text())[1]
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def end(self, number: int) -> int:
        """Its exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A working directory in which the model's name is a path."""
    made = tmp_path_factory.mktemp("cwd")
    sizes = {"vocab_size": vocab_size(), "max_position_embeddings": 131072, "eos_token_id": None}
    # Of the first seeds, the one whose text repeats itself most.
    save_tokenizer(write_hybrid(made / NAME, seed=2, **sizes))
    return made


@pytest.fixture(scope="module")
def servers(directory):
    started = [Command(directory, f"{line} {TEST_OPTIONS}") for line in (PLAIN, NGRAM)]
    try:
        yield started
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()


def test_vllm_39273(servers):
    """There the second server wrote something else; here it says the same, in fewer steps."""
    answers = [
        httpx.post(
            f"{server.url()}/v1/completions",
            json=REQUEST | {"include_speculation_stats": True, "return_token_ids": True},
            timeout=PATIENCE_S,
        ).json()
        for server in servers
    ]
    plain, ngram = answers
    assert ngram["choices"] == plain["choices"]
    assert len(plain["choices"][0]["token_ids"]) == MAX_TOKENS
    assert plain["speculation"]["num_steps"] == MAX_TOKENS
    speculation = ngram["speculation"]
    assert speculation["num_steps"] < MAX_TOKENS
    assert 0 < speculation["num_accepted_tokens"] < speculation["num_draft_tokens"]
    assert "gdn_prefill_backend" in servers[0].log.read_text()


def child(server: Command, module: str) -> psutil.Process:
    """The process of the server that runs a module, once there is one."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for one in psutil.Process(server.process.pid).children():
            if module in " ".join(one.cmdline()):
                return one
        time.sleep(0.1)
    raise AssertionError(server.log.read_text())


def loads(process: psutil.Process, library: str) -> bool:
    return any(library in Path(part.path).name for part in process.memory_maps())


def test_the_serving_process_serves_without_tensors(servers):
    """It needs seconds and 200 MB less than a process that loads torch."""
    url = servers[0].url()
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    for path, body in (("chat/completions", chat), ("completions", {**REQUEST, "max_tokens": 2})):
        answer = httpx.post(f"{url}/v1/{path}", json={"model": NAME} | body, timeout=PATIENCE_S)
        assert answer.json()["usage"]["completion_tokens"] == 2
    serving = psutil.Process(servers[0].process.pid)
    assert loads(child(servers[0], "serving.engine_main"), "libtorch")
    assert not any(loads(serving, library) for library in ("libtorch", "xgrammar", "tvm_ffi"))


def test_a_process_that_tries_grammars_waits_for_the_first(servers):
    servers[0].url()
    assert child(servers[0], "grammar.trial_main").is_running()


def test_sigterm_lets_requests_finish_and_takes_no_new_ones(servers):
    server = servers[1]
    url = server.url()
    body = REQUEST | {"stream": True, "max_tokens": 300}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while httpx.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 200:
            assert time.monotonic() < deadline
        refused = httpx.post(f"{url}/v1/completions", json=REQUEST, timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).json()["status"] == "draining"
        *_, last, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(PATIENCE_S) == 0
    log = server.log.read_text()
    assert "POST /v1/completions" in log
    assert "GET /ready" not in log
    assert "GET /health" not in log


def test_sigint_ends_the_server_at_once(servers):
    """Clients are told, streamed and not, and no response is cut off."""
    server, body = servers[0], REQUEST | {"max_tokens": 100_000}
    url = f"{server.url()}/v1/completions"
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(httpx.post, url, json=body, timeout=PATIENCE_S)
        streamed = body | {"stream": True}
        with httpx.stream("POST", url, json=streamed, timeout=PATIENCE_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            metrics = f"{server.url()}/metrics"
            while not re.search(r"requests_running\S* 2", httpx.get(metrics).text):
                time.sleep(0.05)
            server.process.send_signal(signal.SIGINT)
            *_, last, done = [line for line in lines if line]
        answers = (whole.result().json(), json.loads(last.removeprefix("data: ")))
    assert [answer["error"]["code"] for answer in answers] == ["aborted"] * 2
    assert (whole.result().status_code, done) == (503, "data: [DONE]")
    assert server.process.wait(PATIENCE_S) == 130
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "timeout graceful shutdown" not in log
