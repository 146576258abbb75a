"""EngineClient over an engine process whose messages the test chooses."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from helpers.scheduler_limits import make_limits
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.engine.input_processor import InputProcessor
from sametoken.engine.summary import summarise
from sametoken.engine.user_inputs import PromptTokens
from sametoken.errors import (
    DrainingError,
    EngineDeadError,
    EngineRestartingError,
    NumericalError,
    OverloadedError,
    RequestError,
)
from sametoken.serving.engine_client import EngineClient
from sametoken.serving.limits import ServingLimits
from sametoken.serving.messages import (
    Answer,
    Order,
    Pause,
    Ready,
    Refused,
    Release,
    Resume,
    StepReport,
    Submit,
    Withdraw,
)
from sametoken.serving.stats import EngineLoad
from sametoken.types.request import RequestUpdate
from sametoken.types.sampling_params import SamplingParams

PROMPT = (10, 11, 12)
#: For what comes at once or never.
PATIENCE_S = 20.0
NGRAM = SpeculativeConfig("ngram", 8)
LIMITS = make_limits(max_num_seqs=2, block_size=8, num_blocks=8)


class FakeProcess:
    """Keeps what it is sent; says what it is told to."""

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.sent = []
        self.ended = asyncio.Event()
        self.says = None
        self.num_submits = 0
        self.cause = EngineDeadError("the fake died")

    def send(self, message) -> None:
        self.sent.append(message)
        self.num_submits += isinstance(message, Submit)

    async def receive(self):
        await self.ended.wait()
        said, self.says = self.says, None
        if said is not None:
            self.ended.clear()
        return said

    async def stop(self):
        self.ended.set()
        return self.cause

    def kill(self, cause) -> None:
        self.cause = cause
        self.ended.set()

    def say(self, said) -> None:
        self.says = said
        self.ended.set()

    def take_sent(self) -> list:
        sent, self.sent = self.sent, []
        return sent


class Kit:
    """A client, its process, and its input processor."""

    def __init__(self, resolved, tokenizer, **limits) -> None:
        self.process = FakeProcess(Ready(summarise(resolved), LIMITS))
        bounds = ServingLimits(**{"max_restarts": 0, **limits})
        config = EngineConfig(model="nowhere")
        self.client = EngineClient(self.process, config, pytest.fail, bounds, tokenizer)
        self.inputs = InputProcessor(
            tokenizer,
            vocab_size=len(tokenizer.hf),
            max_model_len=64,
            eos_token_ids=(0,),
            num_speculative_tokens=8,
            seed=0,
        )

    def begin(self, request_id="r", **params):
        prompt = PromptTokens(None, PROMPT)
        params = SamplingParams(**{"max_tokens": 4, **params})
        return self.client.begin(self.inputs.process(request_id, prompt, params))

    async def die(self) -> None:
        """The process does, which the client hears of."""
        self.process.ended.set()
        await asyncio.sleep(0.01)

    async def finish(self, request_id) -> None:
        stream = self.begin(request_id)
        self.report(update(request_id, 20, 21, 22, 23))
        await anext(stream)

    async def order(self, command) -> tuple[asyncio.Future, Order]:
        """Give a command: its end, and the order that was sent, after which nothing was."""
        given = asyncio.ensure_future(self.client.command(command))
        await asyncio.sleep(0)
        return given, self.process.sent.pop()

    def report(self, *updates, num_submits=None, begun=(), **load) -> None:
        """A step, by default after all that was submitted has been taken."""
        taken = self.process.num_submits if num_submits is None else num_submits
        self.client.take(StepReport(updates, EngineLoad(**load), 0.01, taken, begun))


def update(request_id, *token_ids, **changes):
    return RequestUpdate(request_id, token_ids, max(len(token_ids) - 1, 0), 0, True, 0, **changes)


@pytest.fixture
def open_kit(resolved, tokenizer):
    """Opens kits, on a test's event loop."""
    decided = replace(resolved, config=replace(resolved.config, speculative_config=NGRAM))

    @asynccontextmanager
    async def opened(**limits):
        kit = Kit(decided, tokenizer, **limits)
        try:
            yield kit
        finally:
            await kit.client.supervisor.stop()

    return opened


async def test_a_request_goes_out_and_its_outputs_come_back(open_kit):
    async with open_kit() as kit:
        stream = kit.begin()
        (submit,) = kit.process.take_sent()
        assert [one.request_id for one in submit.completions] == ["r"]
        kit.report(update("r", 20))
        assert (await anext(stream)).outputs[0].token_ids == (20,)
        kit.report(update("r", 21, 22, 23, 24))
        last = await anext(stream)
        assert (last.finished, last.outputs[0].token_ids) == (True, (20, 21, 22, 23))
        assert kit.process.take_sent() == [Release({"r": 7})]
        assert kit.client.idle.is_set()
        assert kit.client.stats.num_finished == {"length": 1}


async def test_a_stop_string_ends_the_request_and_frees_the_engine(open_kit):
    async with open_kit() as kit:
        dog = kit.inputs.tokenize("the dog").token_ids
        stream = kit.begin(stop="og", max_tokens=20)
        kit.process.take_sent()
        kit.report(update("r", *dog, 30))
        last = await anext(stream)
        assert (last.outputs[0].text, last.outputs[0].stop_reason) == ("the d", "og")
        assert kit.process.take_sent() == [Release({"r": len(PROMPT) + len(dog)})]


async def test_tokens_cut_at_a_stop_are_not_counted_and_those_of_aborted_requests_are(open_kit):
    async with open_kit() as kit:
        dog = kit.inputs.tokenize("the dog").token_ids
        stopped = kit.begin("stopped", stop="og", max_tokens=20, n=2)
        kit.begin("aborted", max_tokens=20)
        first, second = "stopped.0", "stopped.1"
        assert [one.request_id for one in kit.process.take_sent()[0].completions] == [first, second]
        kit.report(update(first, *dog, 30), update(second, 20), update("aborted", 40, 41))
        # A step in flight when its completion ended.
        kit.report(update(first, 31, 32))
        kit.report(update(second, *dog))
        counts = [len(one.token_ids) for one in (await anext(stopped)).outputs]
        assert counts == [len(dog), 1 + len(dog)]
        kit.client.abort("aborted")
        assert kit.client.stats.num_output_tokens == sum(counts) + 2


async def test_a_failed_request_fails_alone(open_kit):
    async with open_kit() as kit:
        bad, good = kit.begin("bad"), kit.begin("good")
        kit.report(update("bad", failed=True), update("good", 20))
        last = await anext(bad)
        assert last.outputs[0].finish_reason == "error"
        assert isinstance(last.outputs[0].error, NumericalError)
        assert (await anext(good)).outputs[0].token_ids == (20,)
        assert kit.client.stats.num_finished == {"error": 1}


async def test_an_abort_is_sent_at_once_and_answered(open_kit):
    async with open_kit() as kit:
        stream = kit.begin()
        kit.report(update("r", 20))
        kit.process.take_sent()
        kit.client.abort("r")
        kit.client.abort("unknown")
        assert kit.process.take_sent() == [Release({"r": 4}, aborted=True)]
        last = await anext(stream)
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        kit.report(update("r", 21))
        assert [one async for one in stream] == []


async def test_an_id_that_is_used_again_gets_nothing_of_the_request_before(open_kit):
    async with open_kit() as kit:
        await kit.begin(n=2).aclose()
        kit.begin("other")
        stream = kit.begin(n=2)
        kit.report(update("r.0", 20), update("other", 30), update("r.1", 21), num_submits=2)
        assert kit.client.stats.num_output_tokens == 1
        kit.client.take(Refused(("r.0", "r.1"), RequestError("of the first"), 2))
        kit.report(update("r.0", 22), update("r.1", 23), num_submits=3)
        assert [one.token_ids for one in (await anext(stream)).outputs] == [(22,), (23,)]


async def test_a_request_waits_until_its_first_step_begins(open_kit):
    """Not one of the request that had its id before, and not until a step's end."""
    async with open_kit() as kit:
        await kit.begin().aclose()
        stream = kit.begin()
        kit.report(begun=("r",), num_submits=1)
        kit.report(update("r", 20), begun=("r",))
        metrics = (await anext(stream)).metrics
        assert metrics.first_token_time - metrics.first_scheduled_time == pytest.approx(0.01)


async def test_a_dropped_stream_aborts_its_request(open_kit):
    async with open_kit() as kit:
        stream = kit.begin()
        kit.process.take_sent()
        del stream
        gc.collect()
        await asyncio.sleep(0)
        assert kit.process.take_sent() == [Release({"r": 3}, aborted=True)]
        assert kit.client.idle.is_set()


async def test_a_stream_that_was_dropped_late_spares_the_next_request_of_its_id(open_kit):
    async with open_kit() as kit:
        stream = kit.begin()
        del stream
        gc.collect()
        kit.client.abort("r")
        stream = kit.begin()
        await asyncio.sleep(0)
        kit.report(update("r", 20))
        assert (await anext(stream)).outputs[0].token_ids == (20,)


async def test_all_completions_of_a_prompt_end_together(open_kit):
    async with open_kit() as kit:
        stream = kit.begin(n=2)
        kit.report(update("r.0", 20), update("r.1", 21))
        assert [one.token_ids for one in (await anext(stream)).outputs] == [(20,), (21,)]
        kit.process.take_sent()
        await stream.aclose()
        assert kit.process.take_sent() == [Release({"r.0": 4, "r.1": 4}, aborted=True)]


@pytest.mark.parametrize("taken", ["r", "r.0", "r.1"])
async def test_ids_in_use_are_refused_also_those_of_completions(open_kit, taken):
    async with open_kit() as kit:
        stream = kit.begin(n=2)
        with pytest.raises(RequestError, match=f"'{taken}' is already here"):
            kit.begin(taken)
        await stream.aclose()
        kit.begin(taken)


async def test_a_request_that_can_never_run_is_refused_before_it_is_sent(open_kit):
    async with open_kit() as kit:
        kit.process.ready = replace(kit.process.ready, limits=replace(LIMITS, num_blocks=2))
        with pytest.raises(RequestError, match="may need 3 KV blocks"):
            kit.begin(max_tokens=20)
        assert kit.process.sent == []


async def test_too_many_waiting_are_refused_and_counted(open_kit):
    async with open_kit(max_waiting=1) as kit:
        streams = [kit.begin(f"r{i}") for i in range(3)]
        with pytest.raises(OverloadedError) as caught:
            kit.begin("one too many")
        assert caught.value.retry_after_s >= 1
        assert kit.client.stats.num_overloaded == 1
        await streams[0].aclose()
        kit.report(num_received=3, num_running=2)
        kit.begin("now")


async def test_what_the_engine_refuses_fails_alone(open_kit):
    async with open_kit() as kit:
        refused, other = kit.begin("refused"), kit.begin("other")
        kit.client.take(Refused(("refused",), RequestError("too long"), 1))
        with pytest.raises(RequestError, match="too long"):
            await anext(refused)
        kit.report(update("other", 20))
        assert (await anext(other)).outputs[0].token_ids == (20,)


async def test_when_the_process_dies_every_request_fails_with_one_error(open_kit):
    async with open_kit() as kit:
        streams = [kit.begin(f"r{i}") for i in range(2)]
        kit.report(update("r0", 20))
        await kit.die()
        # What was not read is read as it was, unfinished.
        (unread,) = (await anext(streams[0])).outputs
        assert (unread.token_ids, unread.finish_reason) == ((20,), None)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="the fake died"):
                await anext(stream)
        assert not kit.client.is_ready
        assert kit.client.stats.num_failed == 2
        assert kit.client.stats.load == EngineLoad()
        # Nothing of what was on its way, asleep or paused is left to the next process.
        assert kit.client._outputs.num_unfinished == 0
        assert not kit.client.is_sleeping
        assert not kit.client.is_paused
        assert not kit.client._queue.has_unfinished
        with pytest.raises(EngineDeadError, match="the engine is gone"):
            kit.begin("later")


async def test_between_two_processes_requests_are_told_to_come_again(open_kit):
    async with open_kit(max_restarts=1, restart_backoff_s=100.0) as kit:
        await kit.die()
        with pytest.raises(EngineRestartingError, match="being started again"):
            kit.begin()


async def test_results_that_cannot_be_taken_in_end_the_requests(open_kit, caplog):
    async with open_kit() as kit:
        stream = kit.begin()
        await asyncio.sleep(0)
        kit.process.say("nonsense")
        with pytest.raises(EngineDeadError, match="results cannot be processed"):
            await asyncio.wait_for(anext(stream), 5)


async def test_a_process_that_does_not_report_is_killed(open_kit):
    async with open_kit(step_timeout_s=0.05) as kit:
        stream = kit.begin()
        with pytest.raises(EngineDeadError, match=r"a step took more than 0\.05 s"):
            await asyncio.wait_for(anext(stream), 5)


async def test_a_process_without_work_may_be_silent(open_kit):
    async with open_kit(step_timeout_s=0.05) as kit:
        stream = kit.begin()
        assert kit.client.awaits_report
        kit.process.say(StepReport((update("r", 20, 21, 22, 23),), EngineLoad(1), 0.01, 1))
        assert (await anext(stream)).finished
        assert not kit.client.awaits_report
        await asyncio.sleep(0.1)
        assert kit.client.is_ready


async def test_while_draining_nobody_comes_in_and_the_others_finish(open_kit):
    async with open_kit() as kit:
        stream = kit.begin()
        kit.client.draining = True
        with pytest.raises(DrainingError):
            kit.begin("late")
        assert not kit.client.is_ready
        kit.report(update("r", 20, 21, 22, 23))
        assert (await anext(stream)).finished
        assert kit.client.idle.is_set()


# The shadow audit


async def test_an_audit_runs_in_idle_time_and_gives_way_to_a_request(open_kit):
    async with open_kit(shadow_audit_rate=1.0) as kit:
        await kit.finish("r")
        *_, replay = kit.process.take_sent()
        (plain,) = replay.completions
        assert (plain.request_id, plain.num_speculative_tokens) == ("r#replay#1", 0)
        kit.report(update("r#replay#1", 20), num_received=2, num_running=1, kv_usage=0.5)
        assert kit.client.stats.num_output_tokens == 4, "replays are not served"
        assert kit.client.stats.load == EngineLoad(num_received=2), "nor are they load"

        second = kit.begin("second")
        kit.report(num_received=3, num_running=1)
        assert kit.client.stats.load.num_running == 1
        release, submit = kit.process.take_sent()
        assert release == Release({"r#replay#1": None}, aborted=True)
        assert submit.completions[0].request_id == "second"
        await second.aclose()
        _, again = kit.process.take_sent()
        (again,) = again.completions
        assert again == replace(plain, request_id="r#replay#2")

        kit.report(update("r#replay#2", 20, 21, 22, 23))
        assert kit.process.take_sent() == [Release({"r#replay#2": None}, aborted=True)]
        assert kit.client.stats.audit.num_audited == 1
        assert kit.client.stats.audit.num_mismatched == 0


async def test_a_difference_is_reported(open_kit, caplog):
    async with open_kit(shadow_audit_rate=1.0) as kit:
        await kit.finish("r")
        kit.report(update("r#replay#1", 20, 7))
        difference = kit.client.stats.audit.last_difference
        assert (difference.position, difference.served, difference.replayed) == (1, 21, 7)
        assert kit.client.stats.audit.num_mismatched == 1


async def test_while_others_run_or_the_server_drains_nothing_is_audited(open_kit):
    async with open_kit(shadow_audit_rate=1.0) as kit:
        first, second = kit.begin("first"), kit.begin("second")
        kit.process.take_sent()
        kit.report(update("first", 20, 21, 22, 23))
        await anext(first)
        assert not any(isinstance(message, Submit) for message in kit.process.take_sent())
        kit.client.draining = True
        kit.report(update("second", 20, 21, 22, 23))
        await anext(second)
        assert not any(isinstance(message, Submit) for message in kit.process.take_sent())
        assert kit.client.stats.audit.num_pending == 2


async def test_a_replay_is_not_repeated_after_it_was_refused_or_died(open_kit):
    async with open_kit(shadow_audit_rate=1.0) as kit:
        await kit.finish("r")
        kit.client.take(Refused(("r#replay#1",), RequestError("no"), 2))
        assert kit.client.stats.audit.num_dropped == 1
        await kit.finish("second")
        await kit.die()
        assert kit.client.stats.audit.num_dropped == 2


async def test_a_replay_goes_on_when_an_aborted_request_is_refused(open_kit):
    async with open_kit(shadow_audit_rate=1.0) as kit:
        await kit.finish("r")
        await kit.begin("aborted").aclose()
        kit.client.take(Refused(("aborted",), RequestError("no"), 2))
        kit.report(update("r#replay#2", 20, 21, 22, 23))
        audit = kit.client.stats.audit
        assert (audit.num_audited, audit.num_dropped) == (1, 0)


async def test_a_pause_puts_a_replay_off_until_its_end(open_kit):
    async with open_kit(shadow_audit_rate=1.0) as kit:
        kit.begin("first")
        kit.report(update("first", 20, 21, 22, 23))
        kit.process.take_sent()
        pausing, order = await kit.order(Pause(wait=True))
        assert kit.process.take_sent() == [Release({"first#replay#1": None}, aborted=True)]
        kit.client.take(Answer(order.ticket, paused=True))
        await pausing
        kit.begin("second")
        kit.client.abort_all()
        assert [type(one) for one in kit.process.take_sent()] == [Submit, Release]
        waking, order = await kit.order(Resume())
        kit.client.take(Answer(order.ticket))
        await waking
        (again,) = kit.process.take_sent()
        assert again.completions[0].request_id == "first#replay#2"


async def test_a_command_that_is_cancelled_is_withdrawn(open_kit):
    async with open_kit() as kit:
        pausing, order = await kit.order(Pause(wait=True))
        pausing.cancel()
        await asyncio.wait((pausing,))
        assert kit.process.take_sent() == [Withdraw(order.ticket)]
        assert kit.client.is_paused
        kit.client.take(Answer(order.ticket))
        assert not kit.client.is_paused


async def test_each_command_that_is_lost_with_the_engine_has_an_error_of_its_own(open_kit):
    async with open_kit() as kit:
        given = (kit.client.command(Resume()) for _ in range(2))
        lost = asyncio.gather(*given, return_exceptions=True)
        await asyncio.sleep(0)
        kit.process.ended.set()
        one, other = await asyncio.wait_for(lost, PATIENCE_S)
        assert isinstance(one, EngineDeadError)
        assert str(one) == str(other)
        assert one is not other
        # That of ``AsyncLLM.errored`` holds nobody's frames.
        assert kit.client.supervisor.cause.__traceback__ is None


async def test_a_hung_step_is_seen_while_a_pause_waits_and_not_in_a_pause(open_kit):
    async with open_kit(step_timeout_s=0.05) as kit:
        stream = kit.begin()
        pausing, order = await kit.order(Pause(wait=True))
        assert kit.client.is_paused
        # Of another command, before the pause has begun.
        kit.client.take(Answer(99))
        assert kit.client.is_paused
        kit.process.say(Answer(order.ticket, paused=True))
        await pausing
        await asyncio.sleep(0.2)
        assert not kit.process.ended.is_set()
        again, order = await kit.order(Resume())
        kit.process.say(Answer(order.ticket))
        await again
        waiting, _ = await kit.order(Pause(wait=True))
        kit.process.say(StepReport((), EngineLoad(num_received=1, num_running=1), 0.01, 1))
        with pytest.raises(EngineDeadError, match="a step took more than"):
            await asyncio.wait_for(waiting, PATIENCE_S)
        with pytest.raises(EngineDeadError, match="a step took more than"):
            await anext(stream)


async def test_what_other_weights_served_is_not_replayed_by_the_next_process(open_kit):
    async with open_kit(shadow_audit_rate=1.0) as kit:
        kit.report(weight_version=3)
        stream, _other = kit.begin(), kit.begin("other")
        versions = {"weight_versions": (3, 3)}
        kit.report(update("r", 20, 21, 22, 23, **versions), weight_version=3)
        await anext(stream)
        assert kit.client.stats.audit.num_pending == 1
        await kit.die()
        assert kit.client.stats.audit.num_pending == 0
        assert kit.client.stats.audit.num_dropped == 1
