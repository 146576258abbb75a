"""Ranks as processes: they say what threads say, are seen to die, and end with rank 0."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import psutil
import pytest
import torch

from helpers.checkpoints import write_llama
from helpers.harness import requests_of, run
from helpers.thread_ranks import engine_over_threads
from helpers.updates import tensors_of
from helpers.warm_processes import is_server
from sametoken import LLM, SamplingParams
from sametoken.config import EngineConfig
from sametoken.distributed import ranks
from sametoken.distributed.process_group import meeting
from sametoken.distributed.ranks import Enlist, Follower, LeadingRank
from sametoken.engine.build import build_engine
from sametoken.engine.user_inputs import PromptTokens
from sametoken.errors import (
    ConfigError,
    EngineDeadError,
    EngineRestartingError,
    UnsupportedError,
    WeightUpdateError,
)
from sametoken.io import child_process
from sametoken.io.child_process import encode, spawn
from sametoken.serving.async_llm import AsyncLLM
from sametoken.serving.limits import ServingLimits

SIZES = {
    "vocab_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
}
PROMPTS = ((1, 2, 3), (7,) * 20, (5, 6) * 9)
MAX_TOKENS = 12
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
#: For what comes at once or never.
PATIENCE_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def collected():
    """Sockets of engines that died are collected here, not with a warning in a later test."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model") / "target", **SIZES)


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """The processes that the test has started; others are children of this one as well."""
    before = psutil.Process().children()

    def started() -> list[psutil.Process]:
        now = psutil.Process().children()
        return [one for one in now if one not in before and not is_server(one.pid)]

    return started


def config_of(path, **options) -> EngineConfig:
    given = {"tensor_parallel_size": 2, "num_kv_blocks": 40, "device": "cpu"} | options
    return EngineConfig.from_options(model=str(path), skip_tokenizer_init=True, **given)


def items():
    return requests_of(PROMPTS, MAX_TOKENS, 0.0, 0.8)


def gone(process: psutil.Process) -> bool:
    try:
        process.wait(PATIENCE_S)
    except psutil.TimeoutExpired:
        return False
    return True


def outcome(work) -> Future:
    """What ``work`` returns or raises, on a thread that may hang without the test hanging too."""
    result: Future = Future()

    def run_it() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run_it, daemon=True).start()
    return result


def test_processes_say_what_threads_say_and_a_dead_one_ends_all(path, children):
    with engine_over_threads(config_of(path)) as (core, _):
        truth = run(core, items()).tokens
    core = build_engine(config_of(path, speculative_config=NGRAM, steps_in_flight=2))
    (follower,) = children()
    ran = run(core, items())
    assert ran.tokens == truth
    assert ran.accepted > 0

    # Only rank 0 stops it: a terminal's Ctrl-C reaches all.
    follower.send_signal(signal.SIGINT)
    follower.send_signal(signal.SIGTERM)
    assert run(core, items()).tokens == truth

    lost: Future = Future()
    core.peers.when_lost(lost.set_result)
    follower.kill()
    assert "rank 1 of the model ended with SIGKILL" in lost.result(PATIENCE_S).cause
    told_late: Future = Future()
    core.peers.when_lost(told_late.set_result)
    assert told_late.result(PATIENCE_S) is lost.result()

    core.add_request(items()[0])
    # A collective by itself would wait for days.
    error = outcome(lambda: run(core, [])).exception(PATIENCE_S)
    assert isinstance(error, EngineDeadError)
    assert "rank 1 of the model ended with SIGKILL" in error.cause
    assert error.exit_code == 2
    with pytest.raises(EngineDeadError):
        core.add_request(items()[1])


def test_followers_end_with_their_engine(path, children):
    llm = LLM.from_engine(build_engine(config_of(path)), None)
    followers = children()
    (output,) = llm.generate({"prompt_token_ids": [3, 1]}, SamplingParams(max_tokens=2, seed=0))
    assert len(output.outputs[0].token_ids) == 2
    del llm
    gc.collect()
    assert all(gone(process) for process in followers)


def test_they_end_with_it_after_one_of_them_refused_an_update(path, children):
    llm = LLM.from_engine(build_engine(config_of(path)), None)
    followers = children()
    tensors = tensors_of(path)
    tensors["model.layers.0.mlp.up_proj.weight"][-1] = torch.nan
    with pytest.raises(WeightUpdateError, match="NaN"):
        llm.update_weights(tensors.items())
    del llm
    assert all(gone(process) for process in followers)


def test_an_engine_that_cannot_be_built_leaves_nobody_behind(path, children):
    with pytest.raises(ConfigError, match="the KV memory holds"):
        build_engine(config_of(path, num_kv_blocks=1, max_model_len=64))
    assert children() == []


@pytest.mark.parametrize(
    ("module", "error", "match"),
    [
        ("helpers.refusing_follower", UnsupportedError, "not on this machine"),
        # Prints and ends.
        ("this", EngineDeadError, "rank 1 of the model ended with exit status 0"),
    ],
)
def test_a_follower_that_cannot_start_says_why(path, children, monkeypatch, module, error, match):
    monkeypatch.setattr(ranks, "FOLLOWER_MODULE", module)
    with pytest.raises(error, match=match):
        build_engine(config_of(path))
    assert children() == []


def test_a_rank_that_the_system_has_no_room_for_leaves_none_of_the_others(path, monkeypatch):
    started = []

    def spawn_once(*given):
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(spawn(*given))
        return started[0]

    monkeypatch.setattr(ranks, "spawn", spawn_once)
    with pytest.raises(BlockingIOError):
        LeadingRank(config_of(path, tensor_parallel_size=3), torch.device("cpu"))
    ((process, _),) = started
    assert process.poll() is not None


def test_a_follower_whose_rank_0_has_ended_says_nothing(path):
    """As after Ctrl-C while it imports its libraries."""
    (_own,), (other,) = meeting(2, torch.device("cpu"))
    ours, theirs = socket.socketpair()
    with theirs, other:
        fds = theirs.fileno(), other.fileno()
        follower = child_process.subprocess.Popen(
            [sys.executable, "-m", ranks.FOLLOWER_MODULE, *map(str, fds)],
            pass_fds=fds,
            stderr=subprocess.PIPE,
        )
    with follower, ours:
        ours.sendall(encode(Enlist(config_of(path), 1)))
        ours.close()
        _, said = follower.communicate(timeout=PATIENCE_S)
    assert (follower.returncode, said) == (0, b"")


def asked(llm, request_id, max_tokens):
    """A stream of outputs."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, ignore_eos=True)
    return llm.generate(PromptTokens(None, (5, 6, 5, 6, 5)), params, request_id)


async def answered(llm, request_id) -> int:
    """How many tokens a short request gets, from the next engine if this one is lost."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                outputs = [output async for output in asked(llm, request_id, max_tokens=6)]
                return len(outputs[-1].outputs[0].token_ids)
            except EngineRestartingError:
                await asyncio.sleep(0.05)


def engine_and_follower(children) -> tuple[psutil.Process, psutil.Process]:
    (engine,) = children()
    (follower,) = engine.children()
    return engine, follower


async def test_a_served_engine_and_its_ranks_end_together(
    path, children, caplog, tmp_path, monkeypatch
):
    """Within a request, while nothing runs, and where the engine's process is what dies."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    caplog.set_level(logging.ERROR, "sametoken")
    limits = ServingLimits(max_restarts=3, restart_backoff_s=0.0)
    llm = await AsyncLLM.start(config_of(path, speculative_config=NGRAM), limits)
    assert await answered(llm, "first") == 6
    assert await llm.update_weights(path) == 1
    engine, follower = engine_and_follower(children)
    stream = asked(llm, "second", max_tokens=100)
    await anext(stream)
    with pytest.raises(UnsupportedError, match="memory of several ranks"):
        await llm.sleep()
    follower.kill()
    with pytest.raises(EngineDeadError, match="rank 1 of the model ended with SIGKILL"):
        async for _ in stream:
            pass
    assert await asyncio.to_thread(gone, engine)
    assert await answered(llm, "third") == 6

    caplog.clear()
    engine, follower = engine_and_follower(children)
    follower.kill()
    assert await asyncio.to_thread(gone, engine)
    async with asyncio.timeout(PATIENCE_S):
        while llm.stats().num_restarts < 2:
            await asyncio.sleep(0.05)
    assert "the engine died: rank 1 of the model ended with SIGKILL" in caplog.text
    assert await answered(llm, "fourth") == 6

    engine, follower = engine_and_follower(children)
    engine.kill()
    assert await asyncio.to_thread(gone, follower)
    assert list(tmp_path.iterdir()) == []
    await llm.shutdown()


@pytest.mark.parametrize(
    ("size", "match"), [(3, "num_attention_heads=4"), (0, "tensor_parallel_size=0")]
)
def test_what_ranks_cannot_do_is_refused_before_any_starts(path, children, size, match):
    with pytest.raises(ConfigError, match=match):
        build_engine(config_of(path, tensor_parallel_size=size))
    assert children() == []


def test_a_fork_does_not_end_the_ranks_of_the_process_it_left():
    calls = []
    follower = SimpleNamespace(
        hang_up=lambda: calls.append("hang up"), stop=lambda: calls.append("stop")
    )
    ranks._stop(os.getpid() + 1, (follower,))
    assert calls == []
    ranks._stop(os.getpid(), (follower,))
    assert calls == ["hang up", "stop"]


def test_a_message_that_is_cut_off_is_the_end_of_its_rank():
    follower = Follower.__new__(Follower)
    follower.rank, follower.ended = 1, Future()
    follower._sock, theirs = socket.socketpair()
    follower._messages = queue.SimpleQueue()
    follower._process = subprocess.Popen([sys.executable, "-c", "pass"])
    reader = threading.Thread(target=follower._read_all)
    reader.start()
    theirs.sendall(encode(list(range(100)))[:-5])
    theirs.close()
    reader.join(60)
    assert isinstance(follower.ended.result(0), EngineDeadError)
