"""The engine for servers, in its real process, against the engine for programs."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from helpers.checkpoints import write_llama
from helpers.serving import (
    FATAL_TOKEN,
    HANGING_TOKEN,
    SIZES,
    build_faulty,
    build_once,
    build_slowly,
    write_model,
)
from sametoken import LLM, SamplingParams
from sametoken.config import EngineConfig
from sametoken.errors import (
    CheckpointError,
    ConfigError,
    DrainingError,
    EngineDeadError,
    EngineRestartingError,
    OverloadedError,
    RequestError,
    UnsupportedError,
    WeightUpdateError,
)
from sametoken.serving import async_llm
from sametoken.serving.async_llm import AsyncLLM
from sametoken.serving.limits import ServingLimits
from sametoken.serving.messages import FallAsleep
from sametoken.types.structured_outputs import StructuredOutputs

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
WORDS = ("the cat sat on the mat", "def add(left, right):", "Guten Tag", "stop stop", "日本語")
OVERRIDES = (None, 0, 1, 3)
#: For what comes at once or never.
PATIENCE_S = 120.0


def case(i):
    """The i-th prompt and its parameters; every kind of request comes up."""
    params = {"temperature": 0.0 if i % 3 == 0 else 0.9, "seed": i, "max_tokens": 4 + i % 17}
    if i % 5 == 0:
        params["stop"] = ["a", "e "]
    if i % 8 == 0:
        params["logprobs"] = 2
    if i % 11 == 0:
        params["n"] = 2
    if i % 7 == 0:
        params["structured_outputs"] = StructuredOutputs(regex="[a-c]{3,9}")
    return f"{WORDS[i % len(WORDS)]} {i}", SamplingParams(**params)


@pytest.fixture(scope="module")
def model(tmp_path_factory, backend):
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny", backend))


@pytest.fixture(scope="module")
def offline(model):
    """The engine for programs, without speculation."""
    return LLM(model, **SIZES)


@pytest.fixture(scope="module")
def runner():
    """Runs the tests of ``llm`` on its event loop."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(model, runner):
    """An engine that serves."""
    config = EngineConfig.from_options(model=model, speculative_config=NGRAM, **SIZES)
    limits = ServingLimits(
        max_waiting=80, max_restarts=9, restart_window_s=1.0, restart_backoff_s=0.2
    )
    llm = runner.run(AsyncLLM.start(config, limits, build=build_faulty))
    yield llm
    runner.run(llm.shutdown())


async def last_of(stream):
    outputs = [output async for output in stream]
    return outputs[-1]


async def started(llm, request_id: str, **params):
    """The stream of an answer to the first of ``WORDS``, once its first token is there."""
    stream = llm.generate(WORDS[0], SamplingParams(ignore_eos=True, **params), request_id)
    await anext(stream)
    return stream


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def at_rest(llm):
    await until(lambda: llm.stats().load.num_running == llm.stats().load.num_waiting == 0)


def essence(output):
    """All that the user receives but times and counters."""
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs)
        for one in output.outputs
    ]


async def test_64_at_once_are_answered_as_alone_and_offline(llm, offline):
    cases = [case(i) for i in range(64)]
    expected = offline.generate([prompt for prompt, _ in cases], [params for _, params in cases])
    streams = [
        llm.generate(prompt, params, f"case {i}") for i, (prompt, params) in enumerate(cases)
    ]
    outputs = await asyncio.gather(*map(last_of, streams))
    assert [essence(output) for output in outputs] == [essence(output) for output in expected]
    stats = llm.stats()
    assert stats.speculation.num_draft_tokens > 0
    assert sum(stats.num_finished.values()) == 64


async def test_an_id_that_is_used_again_at_once_gets_no_token_of_the_request_before(llm, offline):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    (expected,) = offline.generate([WORDS[1]], params)
    aborted = llm.generate(WORDS[0], replace(params, max_tokens=100), "again")
    await anext(aborted)
    # The loop is busy: reports of the first request pile up.
    time.sleep(0.2)
    await aborted.aclose()
    output = await last_of(llm.generate(WORDS[1], params, "again"))
    assert essence(output) == essence(expected)


async def test_a_request_chooses_its_own_number_of_drafts_and_gets_the_same_tokens(llm, offline):
    prompt = {"prompt_token_ids": [20, 21, 22] * 6}
    params = [
        SamplingParams(temperature=t, seed=4, max_tokens=30, num_speculative_tokens=k)
        for t in (0.0, 1.0)
        for k in OVERRIDES
    ]
    plain = [SamplingParams(temperature=t, seed=4, max_tokens=30) for t in (0.0, 1.0)]
    expected = [one.outputs[0].token_ids for one in offline.generate([prompt] * 2, plain)]
    streams = [llm.generate(prompt, p, f"k {i}") for i, p in enumerate(params)]
    outputs = await asyncio.gather(*map(last_of, streams))
    width = len(OVERRIDES)
    for i, output in enumerate(outputs):
        assert output.outputs[0].token_ids == expected[i // width]
        most = len(output.metrics.speculation.offered_per_position)
        assert most <= (3 if params[i].num_speculative_tokens is None else OVERRIDES[i % width])
    assert outputs[0].metrics.speculation.num_draft_tokens > 0


async def test_outputs_grow_and_text_is_never_taken_back(llm):
    prompt, params = "the cat", SamplingParams(seed=1, max_tokens=40, stop=["zz"])
    outputs = [output async for output in llm.generate(prompt, params, "growing")]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in itertools.pairwise(outputs):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)
        assert len(later.outputs[0].token_ids) > len(earlier.outputs[0].token_ids)


async def test_chat_and_token_ids(llm, offline):
    with pytest.raises(RequestError, match="no chat template"):
        llm.render_chat([{"role": "user", "content": "hi"}])
    tokens = llm.tokenize("the dog")
    assert tokens.token_ids == llm.get_tokenizer().encode("the dog")
    params = SamplingParams(temperature=0.0)
    (expected,) = offline.generate("the dog", params)
    output = await last_of(llm.generate(tokens, params, "tokens"))
    assert essence(output) == essence(expected)


async def test_slow_grammars_keep_no_prompt_from_its_tokens(llm, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(llm._inputs, "process_all", lambda *_: gate.wait(2 * PATIENCE_S))
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    compiling = [asyncio.create_task(llm.prepare([], params, str(index))) for index in range(40)]
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(llm.tokenize, "the dog")
    gate.set()
    await asyncio.gather(*compiling)


def test_the_summary_says_what_the_engine_is(llm, model, offline):
    resolved = llm.resolved
    assert (resolved.model, resolved.model_path) == (model, model)
    assert (resolved.max_model_len, resolved.eos_token_ids) == (256, (0,))
    assert (resolved.device, resolved.dtype) == ("cpu", "float32")
    assert (resolved.method, resolved.num_speculative_tokens) == ("ngram", 3)
    assert "the checkpoint is fp32" in [setting.reason for setting in resolved.settings]
    defaults = offline.get_default_sampling_params()
    assert llm.server_defaults().params == replace(defaults, max_tokens=None)


@pytest.mark.parametrize(
    ("prompt", "params", "cause"),
    [
        ("", {}, "the prompt is empty"),
        ({"prompt_token_ids": [99999]}, {}, "outside the vocabulary"),
        ({"prompt_token_ids": [5] * 256}, {}, "> 255 maximum"),
        ("a", {"num_speculative_tokens": 4}, "num_speculative_tokens=4 is above the engine's 3"),
    ],
)
async def test_bad_requests_are_refused_at_once(llm, prompt, params, cause):
    with pytest.raises(RequestError, match=cause):
        llm.generate(prompt, SamplingParams(**params), "bad")


async def test_arguments_of_vllm_without_a_meaning_here_are_refused(llm):
    with pytest.raises(RequestError, match="priority=1 is not offered"):
        llm.generate("a", SamplingParams(), "refused", priority=1)
    with pytest.raises(RequestError, match="no adapter 'sql'"):
        llm.generate("a", SamplingParams(), "refused", lora_request="sql")
    with pytest.raises(RequestError, match="no adapter 'sql'"):
        await llm.prepare([llm.tokenize("a")], SamplingParams(), "refused", "sql")
    defaults = {"lora_request": None, "priority": 0, "trace_headers": None}
    output = await last_of(llm.generate("a", SamplingParams(), "taken", **defaults))
    assert output.finished


@pytest.mark.parametrize("request_id", [5, ["a"], None, "\ud800"])
async def test_an_id_that_is_no_text_is_refused_and_the_engine_lives(llm, request_id):
    with pytest.raises(RequestError, match="request_id="):
        llm.generate("a", SamplingParams(), request_id)
    with pytest.raises(RequestError, match="request_id="):
        await llm.abort(request_id)
    await last_of(llm.generate("a", SamplingParams(max_tokens=1), "text"))


def test_an_engine_is_not_pickled(llm):
    with pytest.raises(RequestError, match="Load the model in the process that uses it"):
        pickle.dumps(llm)


async def begun(llm, prompt: str, name: str):
    """A stream that has begun and has not ended, however late this process reads its first."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    has_ended, numbers = True, itertools.count()
    while has_ended:
        request_id = f"{name} {next(numbers)}"
        stream = llm.generate(prompt, params, request_id)
        has_ended = (await anext(stream)).finished
    return request_id, stream


async def test_an_abort_ends_the_request_and_frees_the_engine(llm):
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    request_id, aborted = await begun(llm, "the cat", "aborted")
    await llm.abort(request_id)
    _, closed = await begun(llm, "the mat", "closed")
    await closed.aclose()
    cancelled = asyncio.create_task(last_of(llm.generate("the log", params, "cancelled")))
    last = await last_of(aborted)
    cancelled.cancel()
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert len(last.outputs[0].token_ids) < 200
    assert [output async for output in closed] == []
    await at_rest(llm)
    assert llm.stats().load.kv_usage == 0


async def test_too_many_are_refused_and_the_others_are_served(llm):
    params = SamplingParams(temperature=0.0, max_tokens=2)
    # 8 run, 80 wait.
    streams = [llm.generate("the cat", params, f"many {i}") for i in range(88)]
    with pytest.raises(OverloadedError) as caught:
        llm.generate("the cat", params, "too many")
    assert caught.value.retry_after_s >= 1
    outputs = await asyncio.gather(*map(last_of, streams))
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    await last_of(llm.generate("the cat", params, "too many"))


@pytest.mark.parametrize("way", ["killed", "step"])
async def test_a_dead_engine_fails_its_requests_and_comes_back(llm, offline, way):
    prompt, params = "the cat sat", SamplingParams(seed=3, max_tokens=200, ignore_eos=True)
    (expected,) = offline.generate(prompt, params)
    before = llm.stats()
    streams = [llm.generate(prompt, params, f"lost {i}") for i in range(3)]
    await asyncio.gather(*map(anext, streams))
    if way == "killed":
        os.kill(llm._client.supervisor.process.pid, signal.SIGKILL)
    else:
        fatal = {"prompt_token_ids": [FATAL_TOKEN]}
        streams.append(llm.generate(fatal, params, "fatal"))
    for stream in streams:
        with pytest.raises(EngineDeadError, match=r"SIGKILL|a kernel failed"):
            async with asyncio.timeout(PATIENCE_S):
                await last_of(stream)
    assert not llm.is_ready
    assert isinstance(llm.errored, EngineDeadError)
    with pytest.raises(EngineRestartingError):
        llm.generate(prompt, params, "between")
    await until(lambda: llm.is_ready)
    assert llm.errored is None
    stats = llm.stats()
    assert stats.num_restarts == before.num_restarts + 1
    assert stats.num_failed == before.num_failed + len(streams)
    output = await last_of(llm.generate(prompt, params, "lost 0"))
    assert essence(output) == essence(expected)


async def test_a_hung_engine_is_killed_and_comes_back(model, offline):
    config = EngineConfig.from_options(model=model, **SIZES)
    limits = ServingLimits(step_timeout_s=2.0, restart_backoff_s=0.0)
    prompt, params = "the cat", SamplingParams(temperature=0.0)
    (expected,) = offline.generate(prompt, params)
    llm = await AsyncLLM.start(config, limits, build=build_faulty)
    streams = [
        llm.generate({"prompt_token_ids": [HANGING_TOKEN]}, params, "hanging"),
        llm.generate(prompt, params, "beside it"),
    ]
    for stream in streams:
        with pytest.raises(EngineDeadError, match="a step took more than 2 s"):
            async with asyncio.timeout(PATIENCE_S):
                await last_of(stream)
    await until(lambda: llm.is_ready)
    assert llm.stats().num_restarts == 1
    output = await last_of(llm.generate(prompt, params, "after"))
    await llm.shutdown()
    assert essence(output) == essence(expected)


async def test_a_drained_server_finishes_what_it_has(model):
    config = EngineConfig.from_options(model=model, speculative_config=NGRAM, **SIZES)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    llm = await AsyncLLM.start(config, ServingLimits(shadow_audit_rate=1.0))
    audited = await last_of(llm.generate("the log", SamplingParams(seed=2), "audited"))
    await until(lambda: llm.stats().audit.num_audited)
    assert audited.finished
    assert llm.stats().audit.num_mismatched == 0

    stream = llm.generate("the cat", params, "in flight")
    grammar = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    # The first grammar waits for the compiler's process.
    preparing = asyncio.create_task(llm.prepare([llm.tokenize("the")], grammar, "preparing"))
    await asyncio.sleep(0)
    assert not await llm.drain(0.0)
    with pytest.raises(DrainingError):
        await preparing
    with pytest.raises(DrainingError):
        llm.generate("the cat", params, "late")
    reader = asyncio.create_task(last_of(stream))
    assert await llm.drain(60.0)
    assert (await reader).outputs[0].finish_reason == "length"
    await llm.shutdown()
    await llm.shutdown()
    assert not llm.is_ready


async def test_a_server_that_stops_or_gives_up_fails_its_requests(model):
    config = EngineConfig.from_options(model=model, **SIZES)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    async def stopped():
        async with await AsyncLLM.start(config) as llm:
            stream = llm.generate("the cat", params, "r")
        with pytest.raises(EngineDeadError, match="was shut down"):
            await last_of(stream)
        with pytest.raises(EngineDeadError, match=r"the engine is gone .* another AsyncLLM$"):
            llm.generate("the cat", params, "r")

    async def given_up():
        limits = ServingLimits(max_restarts=1, restart_backoff_s=0.0)
        llm = await AsyncLLM.start(config, limits, build=build_once)
        os.kill(llm._client.supervisor.process.pid, signal.SIGKILL)
        await until(lambda: llm.errored and "only once" in llm.errored.cause)
        with pytest.raises(
            EngineDeadError, match=r"the engine is gone .*only once.* another AsyncLLM$"
        ):
            llm.generate("the cat", params, "r")
        await llm.shutdown()

    await asyncio.gather(stopped(), given_up())


async def test_a_shutdown_that_is_cancelled_leaves_no_process(model, monkeypatch):
    llm = await AsyncLLM.start(EngineConfig.from_options(model=model, **SIZES))
    engine, trials_end = llm._client.supervisor.process._process, threading.Event()
    monkeypatch.setattr(llm._trials, "stop", trials_end.set)
    ending = asyncio.create_task(llm.shutdown())
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait((ending,))
    assert ending.cancelled()
    await until(lambda: engine.poll() is not None)
    assert trials_end.is_set()


def test_a_start_that_fails_raises_the_engine_s_own_error(model, tmp_path):
    async def start(limits=None, **options):
        await AsyncLLM.start(EngineConfig.from_options(**options), limits)

    with pytest.raises(CheckpointError, match="neither a path"):
        asyncio.run(start(model=str(tmp_path / "nowhere")))
    with pytest.raises(CheckpointError, match="none' is neither a path"):
        asyncio.run(start(model=model, tokenizer=str(tmp_path / "none"), **SIZES))
    synthetic = {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}
    limits = ServingLimits(shadow_audit_rate=0.1)
    with pytest.raises(ConfigError, match="compares made-up tokens"):
        asyncio.run(start(limits, model=model, speculative_config=synthetic))


@pytest.mark.parametrize("failing", ["load_tokenizer_here", "load_tokenizer_of", "require_own_end"])
async def test_a_start_that_is_refused_beside_its_engine_leaves_none(monkeypatch, failing):
    stopped = []

    class Process:
        ready = SimpleNamespace(summary=SimpleNamespace(model_path="m", vocab_size=1))

        @classmethod
        async def start(cls, *given):
            return cls()

        async def stop(self, *, grace_s):
            stopped.append(grace_s)

    def refuse(*given):
        raise CheckpointError("this tokenizer ends nothing", "name another")

    monkeypatch.setattr(async_llm, "EngineProcess", Process)
    monkeypatch.setattr(async_llm, "load_tokenizer_of", lambda *given: None)
    monkeypatch.setattr(async_llm, failing, refuse)
    with pytest.raises(CheckpointError, match="ends nothing"):
        await async_llm.AsyncLLM.start(EngineConfig(model="m"))
    assert stopped == [0.0]


async def test_a_broken_tokenizer_is_refused_while_the_engine_loads(tmp_path):
    broken = write_llama(tmp_path)
    (broken / "tokenizer.json").write_text("{")
    start = AsyncLLM.start(EngineConfig(model=str(broken)), build=build_slowly)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        await asyncio.wait_for(start, PATIENCE_S)


async def test_weights_change_while_requests_run(llm, offline, model, tmp_path):
    """The engine reads a directory; what fits not is refused, and requests go on."""
    vocab_size = offline.resolved.model.vocab_size
    other = write_llama(
        tmp_path / "other", 5, vocab_size=vocab_size, max_position_embeddings=256, eos_token_id=0
    )
    prompt, params = WORDS[0], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (before,) = offline.generate(prompt, params)
    (after,) = LLM(str(other), tokenizer=model, **SIZES).generate(prompt, params)
    first = llm.weight_version
    long = await started(llm, "long", temperature=0.0, max_tokens=200)
    assert await llm.update_weights(other) == first + 1
    changed = await last_of(llm.generate(prompt, params, "changed"))
    mixed = await last_of(long)
    with pytest.raises(CheckpointError):
        await llm.update_weights(tmp_path / "nowhere")
    with pytest.raises(WeightUpdateError, match="version"):
        await llm.update_weights(model, version=first)
    assert await llm.update_weights(model, version=first + 9) == first + 9
    back = await last_of(llm.generate(prompt, params, "back"))
    assert llm.weight_version == first + 9
    assert essence(changed) == essence(after) != essence(before) == essence(back)
    assert changed.weight_versions == (first + 1, first + 1)
    assert mixed.weight_versions[0] == first < mixed.weight_versions[1]


async def test_a_pause_keeps_waits_or_aborts(llm, offline):
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    (expected,) = offline.generate(WORDS[0], params)
    kept = await started(llm, "kept", temperature=0.0, max_tokens=150)
    await llm.pause("keep")
    later = asyncio.create_task(last_of(llm.generate(WORDS[0], params, "later")))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(later), 0.2)
    rest = asyncio.create_task(last_of(kept))
    waited = asyncio.create_task(llm.pause("wait"))
    assert essence(await rest) == essence(expected)
    await waited
    # It had not begun, or it ran and ended too.
    assert llm.stats().load.num_running == 0
    await llm.resume()
    assert essence(await later) == essence(expected)
    cut = await started(llm, "cut", temperature=0.0, max_tokens=150)
    await llm.pause()
    assert (await last_of(cut)).outputs[0].finish_reason == "abort"
    await llm.resume()
    assert essence(await last_of(llm.generate(WORDS[0], params, "again"))) == essence(expected)
    with pytest.raises(RequestError, match="pause"):
        await llm.pause("soon")


async def cancelled(llm, command) -> None:
    """A command that was sent, and cancelled before its answer could come."""
    engine = llm._client.supervisor.process.pid
    os.kill(engine, signal.SIGSTOP)
    task = asyncio.create_task(command)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    os.kill(engine, signal.SIGCONT)
    assert task.cancelled()


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_a_pause_that_is_cancelled_has_not_been(llm, offline, mode):
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (expected,) = offline.generate(WORDS[0], params)
    running = await started(llm, "running", temperature=0.0, max_tokens=200)
    await cancelled(llm, llm.pause(mode))
    async with asyncio.timeout(PATIENCE_S):
        after = await last_of(llm.generate(WORDS[0], params, "after"))
    assert essence(after) == essence(expected)
    assert not llm.is_paused
    await last_of(running)


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_a_sleep_that_is_cancelled_has_not_been_or_can_be_ended(llm, offline, mode):
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (expected,) = offline.generate(WORDS[0], params)

    async def answered(request_id):
        return essence(await last_of(llm.generate(WORDS[0], params, request_id)))

    running = await started(llm, "running", temperature=0.0, max_tokens=200)
    # As ``sleep`` does, once the engine has said that it can.
    await cancelled(llm, llm._client.command(FallAsleep(1, llm._waits(mode))))
    # Answered after the withdrawal.
    await llm.reset_prefix_cache()
    assert llm.is_paused == llm.is_sleeping == (mode == "abort")
    async with asyncio.timeout(PATIENCE_S):
        if not llm.is_sleeping:
            assert await answered("between") == essence(expected)
        await llm.sleep(mode=mode)
        await llm.wake_up()
        assert await answered("after") == essence(expected)
    await last_of(running)


async def test_a_sleep_of_no_level_ends_no_request(llm):
    running = await started(llm, "running", max_tokens=40)
    with pytest.raises(RequestError, match="no sleep of level 9"):
        await llm.sleep(level=9)
    assert (await last_of(running)).outputs[0].finish_reason == "length"


async def test_a_sleep_that_this_engine_can_never_have_ends_no_request(model, tmp_path):
    spec = {"method": "extract_hidden_states", "shared_storage_path": str(tmp_path)}
    config = EngineConfig.from_options(model=model, speculative_config=spec, **SIZES)
    async with await AsyncLLM.start(config) as llm:
        running = await started(llm, "running", max_tokens=40)
        with pytest.raises(UnsupportedError, match="under extraction"):
            await llm.sleep(level=2)
        assert (await last_of(running)).outputs[0].finish_reason == "length"


async def test_an_update_that_is_cancelled_has_not_been(llm, model):
    version = llm.weight_version + 1
    await cancelled(llm, llm.update_weights(model, version))
    assert await llm.update_weights(model, version) == version
