"""What users of the library do to an ``LLM``: Ctrl-C, threads, forks, finalizers, wrong options."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.build import compile_module_from_src

from helpers.checkpoints import write_llama
from helpers.hybrids import write_hybrid
from sametoken import LLM, SamplingParams
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.errors import (
    ConfigError,
    EngineDeadError,
    NumericalError,
    RequestError,
    UnsupportedError,
)
from sametoken.runner.step import Step

SIZES = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 3,
    "prefill_chunk_size": 16,
    "block_size": 8,
    "num_kv_blocks": 40,
    "steps_in_flight": 2,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}
PROMPTS = [
    {"prompt_token_ids": [3, 4, 5] * 8},
    {"prompt_token_ids": [3, 4, 5] * 8 + [6]},
    {"prompt_token_ids": [7]},
    {"prompt_token_ids": [3, 4, 5] * 3 + [1, 2] * 5},
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=0.8, seed=5, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=30),
    SamplingParams(temperature=0.5, seed=1, max_tokens=12, num_speculative_tokens=1),
]
LONG = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(autouse=True)
def _former_handlers():
    """Handlers that a test sets end with it."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {
        "dense": str(write_llama(directory / "dense")),
        "hybrid": str(write_hybrid(directory / "hybrid")),
    }


@pytest.fixture(scope="module")
def truth(models):
    """What an ``LLM`` that nobody disturbs says to each prompt, by model."""
    return {name: all_tokens(LLM(path, **SIZES)) for name, path in models.items()}


@pytest.fixture
def llm(models):
    return LLM(models["dense"], **SIZES)


def tokens_of(outputs) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def all_tokens(llm: LLM) -> list[tuple[int, ...]]:
    return tokens_of(llm.generate(PROMPTS, PARAMS))


def require_rest(llm: LLM) -> None:
    """Nothing is left of any request, and every slot and block is accounted for."""
    scheduler = llm._engine.scheduler
    assert (llm._requests.num_unfinished, llm._requests._latest) == (0, {})
    assert not llm._engine.has_unfinished
    scheduler.check_integrity()
    assert scheduler.num_running + scheduler.num_waiting + scheduler.num_swapped == 0


def during_steps(llm: LLM, monkeypatch, act) -> None:
    """Have ``act`` called in the midst of every step, with the step's number."""
    submit = type(llm._engine._runner).submit
    numbers = iter(range(10**6))

    def acting(self, plan):
        act(next(numbers))
        return submit(self, plan)

    monkeypatch.setattr(type(llm._engine._runner), "submit", acting)


# Ctrl-C


@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_an_interrupted_llm_goes_on_with_the_same_tokens(models, truth, model):
    llm = LLM(models[model], **SIZES)
    chance = random.Random(3)

    def ask_until(timer: threading.Timer, *, by_stream: bool) -> None:
        timer.start()
        while True:
            if by_stream:
                list(llm.generate_stream(PROMPTS[0], PARAMS[0]))
            else:
                llm.generate(PROMPTS, PARAMS)

    for number in range(24):
        timer = threading.Timer(chance.random() / 100, os.kill, (os.getpid(), signal.SIGINT))
        # Python drops an interrupt that meets a destructor: a user presses again.
        again = threading.Timer(20, os.kill, (os.getpid(), signal.SIGINT))
        again.start()
        with pytest.raises(KeyboardInterrupt):
            ask_until(timer, by_stream=number % 3 == 0)
        again.cancel()
        timer.join()
        if number % 8 == 0:
            assert all_tokens(llm) == truth[model]
    assert all_tokens(llm) == truth[model]
    require_rest(llm)


def test_ctrl_c_waits_for_the_step_and_a_second_one_does_not(llm, truth, monkeypatch):
    num_signals = [0, 0, 1]
    ended = []

    def press(number):
        for _ in range(num_signals[number] if number < len(num_signals) else 0):
            signal.raise_signal(signal.SIGINT)
        ended.append(number)

    with monkeypatch.context() as patch:
        during_steps(llm, patch, press)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
    assert ended == [0, 1, 2]
    assert all_tokens(llm) == truth["dense"]
    num_signals[:], ended[:] = [0, 2], []
    with monkeypatch.context() as patch:
        during_steps(llm, patch, press)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
    assert ended == [0]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"after KeyboardInterrupt\(\) cut a step short"):
            llm.generate(PROMPTS, PARAMS)


def test_ctrl_c_between_the_outputs_of_a_stream_is_the_consumer_s(llm, truth):
    handlers = []

    def consume():
        for _ in llm.generate_stream(PROMPTS[0], LONG):
            handlers.append(signal.getsignal(signal.SIGINT))
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert handlers == [signal.default_int_handler]
    assert all_tokens(llm) == truth["dense"]
    require_rest(llm)


def test_a_user_s_own_handler_is_called_at_once_and_may_raise(llm, truth, monkeypatch):
    seen = []

    def timed_out(number, frame):
        raise TimeoutError("too slow")

    def press(number):
        if number == 2:
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]

    def alarm(number):
        if number == 2:
            signal.raise_signal(signal.SIGALRM)

    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with monkeypatch.context() as patch:
        during_steps(llm, patch, press)
        assert all_tokens(llm) == truth["dense"]
    signal.signal(signal.SIGALRM, timed_out)
    with monkeypatch.context() as patch:
        during_steps(llm, patch, alarm)
        with pytest.raises(TimeoutError, match="too slow"):
            llm.generate(PROMPTS, PARAMS)
    assert all_tokens(llm) == truth["dense"]
    assert signal.getsignal(signal.SIGALRM) is timed_out


def test_ctrl_c_in_an_asyncio_program_cancels_its_task(llm, truth, monkeypatch):
    async def main():
        outputs.extend(llm.generate(PROMPTS, PARAMS))
        await asyncio.sleep(60)

    outputs: list = []
    with monkeypatch.context() as patch:
        during_steps(llm, patch, lambda number: number == 1 and signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    assert tokens_of(outputs) == truth["dense"]
    assert all_tokens(llm) == truth["dense"]


def test_ctrl_c_reaches_who_waits_for_another_thread_s_step(llm, truth, monkeypatch):
    step, go_on = threading.Event(), threading.Event()

    def block(number):
        if threading.current_thread() is not threading.main_thread():
            step.set()
            assert go_on.wait(60)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        during_steps(llm, patch, block)
        other = pool.submit(all_tokens, llm)
        assert step.wait(60)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))

        def wait_for_a_turn():
            timer.start()
            llm.generate(PROMPTS[:1], PARAMS[:1])

        try:
            with pytest.raises(KeyboardInterrupt):
                wait_for_a_turn()
        finally:
            go_on.set()
        assert other.result(60) == truth["dense"]
    assert all_tokens(llm) == truth["dense"]
    require_rest(llm)


# Threads


@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_threads_get_the_tokens_of_one_thread(models, truth, model):
    llm = LLM(models[model], **SIZES)
    start = threading.Barrier(6)

    def ask(name: int) -> list[bool]:
        found = []
        start.wait(60)
        for turn in range(3):
            which = (name + turn) % 4
            if name == 4:
                # This one breaks off every stream, or dies in its midst.
                with contextlib.suppress(ZeroDivisionError):
                    for _ in llm.generate_stream(PROMPTS[which], PARAMS[which]):
                        1 // (turn % 2)
                        break
            elif name == 5:
                stream = llm.generate_stream(PROMPTS[which], LONG)
                first = next(stream)
                llm.abort(first.request_id)
                # Others' steps may have ended the request: then the first output is the last.
                *_, last = [first, *stream]
                found.append(last.outputs[0].finish_reason in ("abort", "length"))
            elif name % 2:
                found.append(all_tokens(llm) == truth[model])
            else:
                *_, last = llm.generate_stream(PROMPTS[which], PARAMS[which])
                found.append(last.outputs[0].token_ids == truth[model][which])
        return found

    with ThreadPoolExecutor(6) as pool:
        found = [future.result(120) for future in [pool.submit(ask, name) for name in range(6)]]
    assert found == [[True] * 3] * 4 + [[], [True] * 3]
    assert all_tokens(llm) == truth[model]
    require_rest(llm)


def test_a_short_call_does_not_wait_for_a_long_one(llm, monkeypatch):
    finished, begun = [], threading.Event()

    def slow(number):
        begun.set()
        time.sleep(0.005)

    def ask(name: str, params: SamplingParams) -> None:
        llm.generate(PROMPTS[2], params)
        finished.append(name)

    during_steps(llm, monkeypatch, slow)
    plain = {"temperature": 0.0, "num_speculative_tokens": 0}
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(ask, "long", SamplingParams(max_tokens=60, **plain))
        assert begun.wait(60)
        pool.submit(ask, "short", SamplingParams(max_tokens=2, **plain)).result(60)
        long.result(60)
    assert finished == ["short", "long"]


def test_a_failure_in_one_thread_is_told_to_all(llm, monkeypatch):
    def fail(number):
        if number == 3:
            raise MemoryError("no memory")

    during_steps(llm, monkeypatch, fail)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(llm.generate, PROMPTS, LONG) for _ in range(3)]
        for future in futures:
            assert isinstance(future.exception(60), EngineDeadError)


def test_streams_that_are_collected_in_mid_step_are_aborted(llm, truth, monkeypatch):
    for prompt in PROMPTS[:3]:
        stream = llm.generate_stream(prompt, LONG)
        next(stream)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
    with monkeypatch.context() as patch:
        during_steps(llm, patch, lambda number: number > 1 or gc.collect())
        assert all_tokens(llm) == truth["dense"]
    require_rest(llm)


def test_a_call_from_within_a_step_is_refused_and_an_abort_is_not(llm, truth, monkeypatch):
    errors = []

    def handler(number, frame):
        llm.abort(first.request_id)
        try:
            llm.generate(PROMPTS, PARAMS)
        except RequestError as error:
            errors.append(error.cause)

    signal.signal(signal.SIGINT, handler)
    stream = llm.generate_stream(PROMPTS[0], LONG)
    first = next(stream)
    with monkeypatch.context() as patch:
        during_steps(llm, patch, lambda number: number == 1 and signal.raise_signal(signal.SIGINT))
        assert all_tokens(llm) == truth["dense"]
    assert errors == ["a signal handler or a finalizer called the engine in the midst of its step"]
    assert list(stream)[-1].outputs[0].finish_reason == "abort"
    assert all_tokens(llm) == truth["dense"]


def require_refused_in_a_fork(act, kind: type[Exception]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                act()
            except kind as error:
                status = 0 if "is its fork" in error.cause else 2
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_fork_is_refused_at_once(llm):
    stream = llm.generate_stream(PROMPTS[0], LONG)
    next(stream)

    def generate():
        stream.close()
        llm.generate(PROMPTS, PARAMS)

    require_refused_in_a_fork(generate, EngineDeadError)
    *_, last = stream
    assert last.outputs[0].finish_reason == "length"


def test_a_fork_looks_for_no_model_of_its_own(llm):
    # Its first parallel operation would wait for ever for threads that only its parent has.
    require_refused_in_a_fork(lambda: LLM("/nowhere/to/be/found"), ConfigError)
    assert llm.generate(PROMPTS[0], LONG)[0].outputs[0].finish_reason == "length"


# Requests that fail


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_prompt_logprobs_of_a_failed_request_do_not_show_its_chunks(
    models, monkeypatch, steps_in_flight
):
    prompts = [{"prompt_token_ids": [3, 4, 5] * 10}, {"prompt_token_ids": [6] * 29}]
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    reported = []
    for chunk in (8, 16):
        sizes = SIZES | {"prefill_chunk_size": chunk, "steps_in_flight": steps_in_flight}
        llm = LLM(models["dense"], **sizes)
        verify = Step._verify

        def poisoned(self, computed, verify=verify):
            rows = computed.x.sampled
            computed.logits[rows.positions - rows.offsets == 29] = torch.nan
            return verify(self, computed)

        with monkeypatch.context() as patch:
            patch.setattr(Step, "_verify", poisoned)
            bad, good = llm.generate(prompts, params)
        assert isinstance(bad.outputs[0].error, NumericalError)
        reported.append(bad.prompt_logprobs)
        # The other one fails too, once it is as long, but after its prompt.
        assert isinstance(good.outputs[0].error, NumericalError)
        assert len(good.prompt_logprobs) == 29
    assert reported == [None, None]


def test_parameters_that_are_changed_after_they_were_checked_change_nothing(llm):
    bias = {3: 1.0}
    params = SamplingParams(temperature=0.0, max_tokens=8, logit_bias=bias)
    (expected,) = tokens_of(llm.generate(PROMPTS[2], params))
    stream = llm.generate_stream(PROMPTS[2], params)
    bias[10**9] = params.logit_bias[10**9] = 1.0
    assert list(stream)[-1].outputs[0].token_ids == expected
    with pytest.raises(RequestError, match="logit_bias holds 1000000000"):
        llm.generate(PROMPTS[2], params)


# Options

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-(10**400), 10**400, 10**5000]),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.sampled_from(["8", "\0", "\ud800", "a" * 5000, "b/" * 9000, "[" * 10**5, "~nobody/x"]),
    st.lists(st.one_of(st.none(), st.integers(), st.floats(), st.just(10**5000)), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.sampled_from([object(), set(), object, 1j, ('{"method":' + "1" * 5000 + "}")]),
)
KINDS = {"bool": bool, "int": int, "float": (int, float), "str": str}
BASES = (
    {"method": "ngram", "num_speculative_tokens": 3},
    {"method": "suffix", "num_speculative_tokens": 3},
    {"method": "eagle3", "num_speculative_tokens": 3, "model": "x", "cascade": "ngram"},
    {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"},
    {"method": "extract_hidden_states", "shared_storage_path": "x"},
)


def taken_or_refused(make):
    """What it makes, or the text of the one error that it may raise."""
    try:
        return make(), ""
    except ConfigError as error:
        text, remedy = str(error), error.remedy
    assert len(text) < 1000
    assert remedy
    return None, text


def require_kind(config, field) -> None:
    value, kind = getattr(config, field.name), field.type.removesuffix(" | None")
    if value is not None and kind in KINDS:
        assert isinstance(value, KINDS[kind]), (field.name, value)
        assert isinstance(value, bool) == (kind == "bool"), (field.name, value)


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
@settings(max_examples=30)
@given(value=ANYTHING)
def test_an_option_of_any_value_is_taken_or_refused_by_name(field, value):
    config, error = taken_or_refused(lambda: EngineConfig.from_options(**{field.name: value}))
    if config is not None:
        require_kind(config, field)
    else:
        assert field.name.split("_")[0] in error


@pytest.mark.parametrize(
    "field", dataclasses.fields(SpeculativeConfig), ids=lambda field: field.name
)
@settings(max_examples=30)
@given(base=st.sampled_from(BASES), value=ANYTHING, parsed=st.booleans())
def test_a_speculative_key_of_any_value_is_taken_or_refused(field, base, value, parsed):
    options = base | {field.name: value}
    make = SpeculativeConfig.parse if parsed else lambda options: SpeculativeConfig(**options)
    config, _ = taken_or_refused(lambda: make(options))
    if config is not None:
        require_kind(config, field)


def test_options_of_wrong_types_load_nothing(models, monkeypatch):
    monkeypatch.setattr("sametoken.engine.load.load_model", None)
    for options in (
        {"max_num_seqs": "8"},
        {"enable_prefix_caching": "no"},
        {"gpu_memory_utilization": "0.9"},
        {"gpu_memory_utilization": float("nan")},
        {"tokenizer": 7},
        {"speculative_config": 5},
        {"speculative_config": "[" * 10**5},
        {"speculative_config": {"method": "ngram", "prompt_lookup_max": 10**18}},
        {"seed": 10**5000},
    ):
        with pytest.raises(ConfigError):
            LLM(models["dense"], **SIZES | options)


@pytest.mark.parametrize("model", [7, "\0", "a" * 5000, "\ud800"])
def test_a_model_that_is_no_path_is_refused(model):
    with pytest.raises(ConfigError, match="model="):
        LLM(model)


@pytest.mark.parametrize("name", ["num_kv_blocks", "max_num_seqs"])
def test_sizes_that_no_machine_holds_are_refused_before_they_are_allocated(
    models, monkeypatch, name
):
    monkeypatch.setattr("sametoken.engine.build._assemble", None)
    monkeypatch.setattr("sametoken.engine.memory_plan.os.sysconf", lambda key: 1024)
    options = {"num_kv_blocks": 2**31} if name == "num_kv_blocks" else {"max_num_seqs": 4096}
    with pytest.raises(ConfigError, match=r"need .*iB, and cpu memory has 1\.0 MiB") as caught:
        LLM(models["dense"], **SIZES | {"max_num_batched_tokens": 64} | options)
    assert name in caught.value.remedy


@pytest.mark.parametrize(
    ("environment", "cause"),
    [({"PATH": ""}, "find C compiler"), ({"CC": "false"}, "non-zero exit status")],
)
def test_a_gpu_without_compiler_or_headers_is_told_what_to_install(
    models, monkeypatch, tmp_path, environment, cause
):
    def launch(*args, **options):
        with pytest.MonkeyPatch.context() as changed:
            changed.delenv("CC", raising=False)
            changed.setenv("TRITON_CACHE_DIR", str(tmp_path))
            for name, value in environment.items():
                changed.setenv(name, value)
            compile_module_from_src("int launcher;", "launcher")

    monkeypatch.setattr("sametoken.engine.build.ModelCache.allocate", launch)
    with pytest.raises(UnsupportedError, match=f"Triton cannot compile .*{cause}") as caught:
        LLM(models["dense"], **SIZES)
    assert "python3-dev" in caught.value.remedy


def test_memory_that_the_machine_does_not_give_is_an_error_of_the_options(models, monkeypatch):
    said = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
    for error in (RuntimeError(said), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):

        def refuse(*args, error=error, **options):
            raise error

        monkeypatch.setattr("sametoken.engine.build.ModelCache.allocate", refuse)
        with pytest.raises(ConfigError, match="does not fit the memory"):
            LLM(models["dense"], **SIZES)
    monkeypatch.setattr("sametoken.engine.load.load_model", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        LLM(models["dense"], **SIZES)
