"""KV that leaves the device: to host memory, to a file, or lost and computed again."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch

from helpers.checkpoints import write_llama
from helpers.harness import (
    Shape,
    build,
    draft_model,
    replayed_by,
    request,
    requests_of,
    run,
    scripted,
    truth,
)
from helpers.hybrid_toy import HybridToy
from helpers.recorded import RecordedLogits
from helpers.swap_files import wait_for_copies
from helpers.toy import ToyModel
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore
from sametoken.io import swap_file
from sametoken.io.swap_file import SwapFile

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4], [5] * 17, [6, 1], [7, 7, 2, 9, 4, 4, 4]]
MAX_TOKENS = 20
TIGHT = Shape(num_blocks=14, num_host_blocks=0)
DENSE = replace(TIGHT, prefix_caching=False, cache_emitted=False)
TOY = ToyModel()


requests = partial(requests_of, PROMPTS, MAX_TOKENS)


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize(
    ("toy", "steps_in_flight"), [(TOY, 1), (HybridToy(), 3)], ids=["ToyModel-1", "HybridToy-3"]
)
def test_without_room_on_the_host_what_was_lost_is_computed_again(toy, steps_in_flight):
    items = requests(0.9)
    core = build(toy, replace(DENSE, steps_in_flight=steps_in_flight), **scripted(toy, "mixed"))
    replayed = replayed_by(core)
    ran = run(core, items)
    assert ran.tokens == truth(toy, items)
    assert any(replayed)
    assert ran.accepted


@pytest.mark.parametrize("num_host_blocks", [0, 5])
def test_a_drafter_s_kv_is_computed_again_too(num_host_blocks):
    shape = replace(TIGHT, num_host_blocks=num_host_blocks, steps_in_flight=2)
    core = build(TOY, shape, make_drafter=lambda parts: draft_model(parts, TOY))
    replayed = replayed_by(core)
    ran = run(core, requests())
    assert ran.tokens == truth(TOY, requests())
    assert any(replayed)
    # The window after a replay has none; all others are right.
    assert ran.accepted == ran.offered > 0


def test_log_probabilities_of_a_prompt_are_told_once():
    def told(shape):
        core, found = build(TOY, shape), {}
        replayed = replayed_by(core)
        for item in requests(prompt_logprobs=1):
            core.add_request(item)
        for _ in range(400):
            for update in core.step():
                found.setdefault(update.request_id, []).extend(update.prompt_logprobs or ())
                state = core.scheduler._running.get(update.request_id)
                if state is not None and len(state.emitted) >= MAX_TOKENS:
                    core.release(update.request_id)
        assert not core.has_unfinished
        return any(replayed), found

    (none, calm), (some, tight) = told(Shape()), told(replace(TIGHT, prefill_chunk_size=3))
    assert (none, some) == (False, True)
    assert tight == calm


def chats(core, turns):
    """Prompts that share beginnings, one after the other and turn after turn."""
    tokens = {}
    for turn in turns:
        for n in range(1, 6):
            item = request(f"{turn}-{n}", [*[n] * 5, *[1, 2, 3, 4] * 3, turn, n], max_tokens=4)
            tokens |= run(core, [item]).tokens
    return tokens


def copy_within_steps(core, file, hangs=lambda: False):
    """Have each step end after its copies, some of which a busy machine drops."""
    step = core.step

    def stepped():
        updates = step()
        wait_for_copies(file, hangs)
        return updates

    core.step = stepped


@lru_cache
def without_cache() -> dict[str, list[int]]:
    return chats(build(TOY, replace(Shape(), prefix_caching=False)), range(3))


def test_idle_prefixes_go_to_host_memory_and_return():
    # One request and a half fit; five beginnings of four blocks do not.
    shape = Shape(num_blocks=10, num_host_blocks=30, num_idle_host_blocks=30)
    core = build(TOY, replace(shape, steps_in_flight=2))
    assert chats(core, range(3)) == without_cache()
    assert core.scheduler.swapped_prefix_hits >= 10 * 16


def with_a_file(directory, shape: Shape) -> tuple[EngineCore, SwapFile]:
    """An engine whose host memory has a file behind it, and the file."""
    files = []

    def make_file(swap):
        files.append(SwapFile(str(directory), 40, swap.host.buffer))
        return files[0]

    return build(TOY, shape, make_file=make_file), files[0]


@pytest.mark.parametrize("broken", [None, "content", "length", "disk"])
def test_blocks_move_on_to_a_file_and_a_broken_one_costs_no_token(
    broken, tmp_path, monkeypatch, caplog
):
    shape = Shape(num_blocks=10, num_host_blocks=8, num_idle_host_blocks=8, steps_in_flight=2)
    core, file = with_a_file(tmp_path, shape)
    if broken == "disk":
        monkeypatch.setattr(os, "pwrite", full)

    copy_within_steps(core, file)
    tokens = chats(core, range(1))
    if broken == "content":
        size = os.fstat(file._file.fileno()).st_size
        os.pwrite(file._file.fileno(), b"\1" * size, 0)
    elif broken == "length":
        os.ftruncate(file._file.fileno(), 3)
    assert tokens | chats(core, range(1, 3)) == without_cache()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (broken is not None)
    assert bool(file.num_blocks) == (broken is None)
    if broken is None:
        # Host memory alone gives none.
        assert core.scheduler.swapped_prefix_hits > 4 * 8
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_hangs_costs_no_token_and_holds_nobody_up_for_ever(
    tmp_path, monkeypatch, caplog
):
    pread, hangs, answers = os.pread, threading.Event(), threading.Event()

    def hanging(*arguments):
        hangs.set()
        answers.wait(60)
        return pread(*arguments)

    shape = Shape(num_blocks=10, num_host_blocks=8, num_idle_host_blocks=8, steps_in_flight=2)
    core, file = with_a_file(tmp_path, shape)
    copy_within_steps(core, file, hangs.is_set)
    tokens = chats(core, range(1))
    monkeypatch.setattr(os, "pread", hanging)
    monkeypatch.setattr(swap_file, "MOST_SECONDS", 0.2)
    tokens |= chats(core, range(1, 2))
    answers.set()
    wait_for_copies(file)
    assert tokens | chats(core, range(2, 3)) == without_cache()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def full(*arguments):
    raise OSError(28, "No space left on device")


def test_preempted_requests_move_on_to_a_file(tmp_path):
    shape = Shape(max_num_seqs=5, num_blocks=14, num_host_blocks=12, prefix_caching=False)
    core, file = with_a_file(tmp_path, shape)
    assert run(core, requests()).tokens == truth(TOY, requests())
    assert file._digests, "nothing was written"


@pytest.mark.parametrize("swap_space", [0, 1])
def test_the_bits_of_accepted_rows_stay_as_they_were(swap_space, tmp_path):
    target = write_llama(tmp_path)

    def logits(**options):
        common = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 8, "device": "cpu"}
        core = build_engine(EngineConfig.from_options(model=str(target), **common | options))
        recorded, replayed = RecordedLogits(), replayed_by(core)
        core._runner = recorded.runner(core._runner)
        return core, replayed, run(core, requests()), recorded

    *_, calm, expected = logits()
    core, replayed, ran, found = logits(num_kv_blocks=9, swap_space=swap_space)
    assert ran.tokens == calm.tokens
    assert any(replayed) == (swap_space == 0)
    assert core.scheduler.num_preemptions
    assert found.rows.keys() == expected.rows.keys()
    assert all(torch.equal(row, expected.rows[key]) for key, row in found.rows.items())
