"""The writer of extracted states, fed step by step: ends, aborts, NaN, memory, reuse."""

from __future__ import annotations

import pytest
import torch

from sametoken.drafters.extract import CommittedRows
from sametoken.errors import ConfigError, InvariantError
from sametoken.extraction import writer
from sametoken.extraction.recording import StateWriter
from sametoken.extraction.shards import ExtractedStates, Manifest, StateSource, read_manifest
from sametoken.io.files import DirectoryLock
from sametoken.types.outputs import RequestResult, StepResult
from sametoken.types.plan import Admission, ScheduledRequest, StepPlan, SwapOut
from sametoken.types.sampling_params import SamplingParams

LAYERS, HIDDEN = 2, 3
SOURCE = StateSource("a/model", "LlamaForCausalLM", 99, HIDDEN, 4, (1, 3), "float32")
ROW_BYTES = LAYERS * HIDDEN * 4


def state(request: int, position: int) -> torch.Tensor:
    return torch.arange(LAYERS * HIDDEN) + 100.0 * position + 10_000 * request


class Device:
    """Runs plans the way an engine does, over slots whose tokens are their positions."""

    def __init__(self, directory, shard_bytes: int = 10**9) -> None:
        self.directory = directory
        lock = DirectoryLock(directory, "end it")
        self.writer = StateWriter(directory, lock, Manifest(SOURCE), LAYERS, shard_bytes)
        self.requests: dict[int, int] = {}
        self.step_id = 0

    def admit(self, slot: int, request: int, prompt_len: int = 2, num_cached: int = 0):
        self.requests[slot] = request
        prompt = tuple(range(prompt_len))
        params = SamplingParams(seed=0)
        return Admission(slot, prompt, num_cached, params, request_id=f"r{request}")

    def launch(self, rows: dict[int, range], *admissions: Admission, failed=()) -> StepResult:
        """A step that commits these positions of these slots."""
        self.step_id += 1
        plan_rows = tuple(ScheduledRequest(slot, 1, 0, True) for slot in rows)
        places = [(slot, position) for slot, span in rows.items() for position in span]
        slots, positions = torch.tensor(places).view(-1, 2).unbind(1)
        states = [state(self.requests[slot], position) for slot, position in places]
        self.writer._rows.put(
            CommittedRows(
                torch.tensor([self.step_id]),
                slots,
                positions,
                positions,
                positions + 1,
                torch.stack(states),
            )
        )
        self.writer.launch(StepPlan(self.step_id, admissions=admissions, requests=plan_rows))
        results = [RequestResult(0, 0, 0, (1,), failed=slot in failed) for slot in rows]
        return StepResult(self.step_id, tuple(results))

    def step(self, rows: dict[int, range], *admissions: Admission, failed=()) -> None:
        self.writer.process_output(self.launch(rows, *admissions, failed=failed))

    def end(self, request: int, num_kept_tokens, aborted: bool = False) -> None:
        self.writer.end(f"r{request}", num_kept_tokens, aborted=aborted)

    def found(self) -> dict[str, int]:
        """Rows of the complete sequences by request, each compared with what was run."""
        sequences = ExtractedStates(self.directory)
        for i in range(len(sequences)):
            one = sequences[i]
            rows = one.hidden_states.shape[0]
            wanted = [state(int(one.request_id[1:]), p).view(LAYERS, HIDDEN) for p in range(rows)]
            assert torch.equal(one.hidden_states, torch.stack(wanted))
            assert one.token_ids.tolist() == list(range(rows + 1))
        return {
            sequences[i].request_id: len(sequences[i].hidden_states) for i in range(len(sequences))
        }

    def num_rows_on_disk(self) -> int:
        shards = read_manifest(self.directory).shards
        return sum(part.stop - part.start for shard in shards for part in shard.ranges)


@pytest.fixture
def device(tmp_path):
    return Device(tmp_path)


def test_rows_of_kept_tokens_are_written_and_rows_past_the_end_are_not(device):
    device.step({0: range(3), 1: range(2)}, device.admit(0, 7), device.admit(1, 8))
    # A window of three accepted drafts, of which the serving process keeps one.
    device.step({1: range(2, 6), 0: range(3, 4)})
    device.end(8, 4)
    late = device.launch({0: range(4, 5), 1: range(6, 8)})
    device.end(7, 5)
    device.writer.process_output(late)
    device.writer.flush()
    assert device.found() == {"r7": 4, "r8": 3}
    assert device.num_rows_on_disk() == 7


def test_a_request_that_is_cut_short_leaves_nothing(device):
    device.step({0: range(3), 1: range(3)}, device.admit(0, 1), device.admit(1, 2))
    device.step({0: range(3, 4), 1: range(3, 4)}, failed=(1,))
    device.end(1, 5, aborted=True)
    device.end(2, 5)
    device.writer.flush()
    assert device.num_rows_on_disk() == 0
    assert read_manifest(device.directory).sequences == ()


def test_nan_after_the_end_harms_nobody(device):
    device.step({0: range(3)}, device.admit(0, 1))
    device.end(1, 4)
    device.step({0: range(3, 4)}, failed=(0,))
    device.writer.flush()
    assert device.found() == {"r1": 3}


def test_memory_is_bounded_and_the_newest_rows_wait(tmp_path):
    device = Device(tmp_path, shard_bytes=4 * ROW_BYTES)
    device.step({0: range(3), 1: range(3)}, device.admit(0, 1), device.admit(1, 2))
    for position in range(3, 20):
        device.step({0: range(position, position + 1), 1: range(position, position + 1)})
        held = 2 * (position + 1) - device.num_rows_on_disk()
        assert 2 <= held <= 4 + 2
    device.end(1, 20)
    device.end(2, 10)
    device.writer.flush()
    manifest = read_manifest(tmp_path)
    assert len(manifest.shards) > 5
    # The second one's front was late: part of what it cut is written, so it does not count.
    assert device.found() == {"r1": 19}
    assert [one.complete for one in manifest.sequences] == [True, False]


def test_what_an_abort_leaves_in_shards_never_becomes_complete(tmp_path):
    device = Device(tmp_path, shard_bytes=ROW_BYTES)
    device.step({0: range(3)}, device.admit(0, 1))
    device.step({0: range(3, 4)})
    device.end(1, 5, aborted=True)
    device.writer.flush()
    (entry,) = read_manifest(tmp_path).sequences
    assert (entry.num_rows, entry.complete) == (3, False)
    assert device.found() == {}


def test_ids_and_slots_come_back(device):
    device.step({0: range(3)}, device.admit(0, 1))
    device.end(1, 3)
    device.step({0: range(3, 4)})
    device.step({0: range(4)}, device.admit(0, 2))
    device.end(2, 5, aborted=True)
    device.step({1: range(5)}, device.admit(1, 2))
    device.end(2, 6)
    device.writer.flush()
    assert device.found() == {"r1": 2, "r2": 5}


def test_an_abort_before_the_first_verdict_is_an_abort(device):
    result = device.launch({0: range(3)}, device.admit(0, 1))
    device.end(1, 2, aborted=True)
    device.writer.process_output(result)
    device.writer.flush()
    assert device.num_rows_on_disk() == 0


def test_the_manifest_says_whether_requests_are_under_way(device):
    device.step({0: range(3)}, device.admit(0, 1))
    assert not read_manifest(device.directory).complete
    device.end(1, 4)
    device.writer.flush()
    assert read_manifest(device.directory).complete
    device.step({0: range(3)}, device.admit(0, 2))
    assert not read_manifest(device.directory).complete
    assert device.found() == {"r1": 3}


def test_rows_that_cannot_be_are_refused(device):
    with pytest.raises(InvariantError, match="from the prefix cache"):
        device.launch({0: range(4, 6)}, device.admit(0, 1, num_cached=4))
    device.writer._rows.take(device.step_id)
    device.step({0: range(3)}, device.admit(0, 1))
    with pytest.raises(InvariantError, match=r"up to position 3, and then positions 4\.\.5"):
        device.step({0: range(4, 6)})
    with pytest.raises(InvariantError, match="keeps 9 tokens"):
        device.end(1, 9)
    device.writer.launch(StepPlan(3, requests=(ScheduledRequest(0, 1, 0, True),)))
    with pytest.raises(InvariantError, match="before its rows were recorded"):
        device.writer.process_output(StepResult(3, (RequestResult(0, 0, 0, (1,)),)))


def test_a_step_without_rows_brings_none(device):
    device.writer.launch(StepPlan(1, swap_outs=(SwapOut(None, (0,), (0,)),)))
    device.writer.process_output(StepResult(1, ()))
    device.writer.end("unknown", 4, aborted=False)
    device.writer.flush()
    assert not (device.directory / "manifest.json").exists()


def test_a_shard_that_cannot_be_written_is_written_the_next_time(device, monkeypatch):
    device.step({0: range(2)}, device.admit(0, 1))
    device.end(1, 2)
    written = writer.write_shard

    def full(*given):
        raise ConfigError("no room", "make some")

    monkeypatch.setattr(writer, "write_shard", full)
    with pytest.raises(ConfigError, match="no room"):
        device.writer.flush()
    monkeypatch.setattr(writer, "write_shard", written)
    device.launch({1: range(1)}, device.admit(1, 2))
    assert read_manifest(device.directory).sequences == ()
    device.writer.flush()
    assert [one.request_id for one in read_manifest(device.directory).sequences] == ["r1"]
