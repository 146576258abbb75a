"""Host blocks and places in a file: who has them, who makes room, and when they may be copied."""

from __future__ import annotations

from collections import deque

import pytest

from sametoken.scheduler.scheduler import Scheduler
from sametoken.scheduler.swap_space import MOST_WRITES, Found, SwapSpace


class File:
    """Copies end when the test says so, or before the next step."""

    def __init__(self, num_blocks: int = 8, *, is_fast: bool = False) -> None:
        self.num_blocks = num_blocks
        self.is_fast = is_fast
        self.log: list[tuple[str, int, int]] = []
        self.ended: deque[tuple[int, bool]] = deque()
        self.waits = 0

    def write(self, place, host_block):
        self._note("write", place, host_block)

    def read(self, place, host_block):
        self._note("read", place, host_block)

    def _note(self, what, place, host_block):
        self.log.append((what, place, host_block))
        if self.is_fast:
            self.ended.append((place, True))

    def finished(self, *, wait=False):
        assert self.ended or not wait, "it would wait for ever"
        self.waits += wait
        ended, self.ended = self.ended, deque()
        return ended


def key(n: int) -> bytes:
    return bytes([n])


def request(name: int, count: int):
    return [(name, index) for index in range(count)]


def planned(space: SwapSpace, step_id: int) -> None:
    """Plan and run a step."""
    space.begin(step_id)
    space.processed(step_id)


def writing() -> tuple[SwapSpace, File]:
    """Four prefixes fill host memory, and the first is on its way to the file."""
    file = File()
    space = SwapSpace(4, 4, file)
    space.begin(0)
    for n in range(4):
        space.save_prefix(key(n))
    planned(space, 1)
    space.begin(2)
    return space, file


def test_a_request_is_saved_whole_or_not_at_all():
    space = SwapSpace(4, 0)
    space.begin(0)
    assert len(set(space.save_request(request(0, 3)))) == 3
    assert space.save_request(request(1, 2)) is None
    assert space.usage == 0.75
    assert space.fetch(request(0, 3)) is Found.HERE
    assert space.fetch(request(0, 4)) is Found.GONE


def test_idle_prefixes_have_their_share_and_make_room_for_requests():
    space = SwapSpace(5, 3)
    for n in range(4):
        space.begin(n)
        assert space.save_prefix(key(n)) is not None
    assert space.saved_prefix([key(0)]) == ()
    space.begin(4)
    assert space.save_prefix(key(1)) is None, "it is there, and now the newest"
    assert space.save_request(request(0, 4)) is not None
    assert [n for n in range(4) if space.saved_prefix([key(n)])] == [1]
    assert space.save_request(request(1, 2)) is None


def test_what_a_step_copies_or_wants_is_not_dropped_in_it():
    space = SwapSpace(2, 2)
    space.begin(0)
    assert space.save_prefix(key(0)) is not None
    assert space.save_prefix(key(1)) is not None
    assert space.save_prefix(key(2)) is None
    space.begin(1)
    assert space.fetch([key(0)]) is Found.HERE
    assert space.save_prefix(key(3)) is not None
    assert space.saved_prefix([key(0), key(1)]) == (key(0),)
    space.begin(2)
    assert space.save_prefix(key(4)) is not None
    assert space.saved_prefix([key(0)]) == ()


def test_blocks_that_a_step_reads_are_free_from_the_next_one_on():
    space = SwapSpace(2, 0)
    space.begin(0)
    space.save_request(request(0, 2))
    space.begin(1)
    space.host_blocks(request(0, 2))
    space.drop(request(0, 2))
    assert space.usage == 0
    assert space.save_request(request(1, 1)) is None
    space.begin(2)
    assert space.save_request(request(1, 2)) is not None


def test_a_block_is_written_once_its_step_has_run_and_read_into_a_quiet_one():
    file = File()
    space = SwapSpace(4, 4, file)
    space.begin(0)
    blocks = [space.save_prefix(key(n)) for n in range(4)]
    space.begin(1)
    assert file.log == [], "the copy to the host may not have been made"
    space.processed(0)
    space.begin(1)
    assert file.log == [("write", 0, blocks[0])]
    assert space.fetch([key(0)]) is Found.COMING
    file.ended.append((0, True))
    space.begin(2)
    assert len(space._filed) == 1
    assert space.save_prefix(key(0)) is None, "it is in the file"
    assert space.fetch([key(0)]) is Found.COMING
    assert file.log[1:] == [("read", 0, blocks[0])]
    file.ended.append((0, True))
    space.begin(3)
    assert space.fetch([key(0)]) is Found.HERE
    assert space.host_blocks([key(0)]) == (blocks[0],)
    assert len(space._filed) == 0


def test_blocks_go_to_the_file_and_come_back_again_and_again():
    space = SwapSpace(4, 4, File(is_fast=True))
    for n in range(4):
        planned(space, n)
        assert space.save_prefix(key(n)) is not None
    for step_id in range(4, 24):
        planned(space, step_id)
        assert space.fetch([key(step_id % 4)]) is not Found.GONE
    for step_id in (24, 25, 26):
        planned(space, step_id)
    assert (len(space._free), len(space._filed), len(space._free_places)) == (1, 1, 7)


@pytest.mark.parametrize("reads", [False, True])
def test_a_failed_copy_loses_at_most_its_block(reads):
    space, file = writing()
    file.ended.append((0, reads))
    planned(space, 3)
    if reads:
        assert space.fetch([key(0)]) is Found.COMING
        file.ended.append((0, False))
        space.begin(4)
    assert space.saved_prefix([key(0)]) == (() if reads else (key(0),))
    assert len(space._free) + len(space._idle) == 4


def test_the_oldest_prefix_leaves_the_file_and_requests_stay():
    space = SwapSpace(8, 6, File(3, is_fast=True))
    space.begin(0)
    space.save_request(request(0, 2))
    for n in range(20):
        planned(space, n + 1)
        assert space.save_prefix(key(n)) is not None
    assert len(space._filed) in (2, 3)
    assert space.fetch(request(0, 2)) is not Found.GONE
    kept = [n for n in range(20) if space.saved_prefix([key(n)])]
    assert kept == list(range(20 - len(kept), 20))
    assert len(kept) > 6, "more than host memory holds"


def test_what_is_dropped_on_its_way_frees_both_ends():
    space, file = writing()
    space.drop([key(0)])
    assert space.usage == 1
    file.ended.append((0, True))
    space.begin(3)
    assert space.usage == 0.75
    assert sorted(space._free_places) == list(range(8))


def test_what_is_dropped_from_the_file_frees_its_place():
    space, file = writing()
    file.ended.append((0, True))
    space.begin(3)
    space.drop([key(0)])
    assert sorted(space._free_places) == list(range(8))


def test_a_wait_ends_with_a_copy():
    space, file = writing()
    assert space.is_moving
    file.ended.append((0, True))
    space.wait()
    assert (space.is_moving, file.waits) == (False, 1)


def test_a_plan_waits_for_the_file_if_nothing_else_can_go_on(kit):
    file = File()
    sizes = {"num_blocks": 6, "num_host_blocks": 4, "num_idle_host_blocks": 8}
    scheduler = Scheduler(kit.limits(**sizes), file)
    scheduler.add(kit.request("a", 17, max_total=18))
    kit.step(scheduler)
    scheduler.release("a")
    scheduler.add(kit.request("b", 20, max_total=22))
    kit.step(scheduler)
    window = scheduler.plan()
    assert file.log == [("write", 0, 0)]
    # It is at its limit, and a step is in flight.
    assert scheduler.plan() is None
    scheduler.process_output(kit.result(window))
    scheduler.release("b")
    assert file.waits == 0
    # The block is written, then read back.
    file.ended.append((0, True))
    file.is_fast = True
    scheduler.add(kit.request("a", 17, max_total=18))
    assert scheduler.plan().admissions[0].num_cached == 16
    assert file.log[1:] == [("read", 0, 0)]
    assert file.waits > 0


def reads(file: File) -> list[tuple[str, int, int]]:
    return [copy for copy in file.log if copy[0] == "read"]


def test_a_block_is_read_into_one_that_no_step_in_flight_uses():
    space, file = writing()
    file.ended.append((0, True))
    space.begin(3)
    [block] = space.save_request(request(0, 1))
    space.begin(4)
    space.drop(request(0, 1))
    assert space.fetch([key(0)]) is Found.COMING
    assert reads(file) == [], "the copy to the host may not have been made"
    space.processed(3)
    space.begin(5)
    assert space.fetch([key(0)]) is Found.COMING
    assert reads(file) == [("read", 0, block)]


def test_what_nothing_makes_room_for_is_gone():
    space, file = writing()
    file.ended.append((0, True))
    space.begin(3)
    assert space.save_request(request(0, 4)) is not None
    assert space.fetch([key(0)]) is Found.GONE
    # A block is on its way to the file, and leaves its place in host memory.
    planned(space, 4)
    space.begin(5)
    assert space.is_moving
    assert space.fetch([key(0)]) is Found.COMING
    assert reads(file) == []


def test_a_full_file_takes_no_block_of_a_request():
    file = File(1)
    space = SwapSpace(8, 0, file)
    space.begin(0)
    [first, *_] = space.save_request(request(0, 8))
    planned(space, 1)
    space.begin(2)
    assert file.log == [("write", 0, first)]
    file.ended.append((0, True))
    space.begin(3)
    assert file.log == [("write", 0, first)]
    assert space.fetch(request(0, 8)) is Found.COMING


def test_no_host_memory_is_not_in_use():
    assert SwapSpace(0, 0).usage == 0


def test_half_of_host_memory_at_most_is_read_for_a_prefix():
    space = SwapSpace(8, 8, File(9, is_fast=True))
    for n in range(16):
        planned(space, n)
        assert space.save_prefix(key(n)) is not None
    assert len(space._filed) > 5
    assert space.saved_prefix([key(n) for n in range(16)]) == tuple(key(n) for n in range(4))
    assert space.fetch([key(n) for n in range(4)]) is Found.COMING
    planned(space, 16)
    assert space.fetch([key(n) for n in range(4)]) is Found.HERE


def test_blocks_on_their_way_to_a_slow_file_are_not_looked_through_again_and_again():
    """Each block that makes room is found at once, however many are being written."""
    looked_at = 0

    class Counting(SwapSpace):
        def _may_drop(self, saved):
            nonlocal looked_at
            looked_at += 1
            return super()._may_drop(saved)

    space = Counting(80, 80, File(num_blocks=80))
    space.begin(0)
    for n in range(80):
        space.save_prefix(key(n))
    space.processed(0)
    space.begin(1)
    assert [space.save_prefix(key(100 + n)) is not None for n in range(40)] == [True] * 40
    assert looked_at == 40


def test_a_slow_file_has_few_blocks_to_write_at_once():
    """What is read waits behind them."""
    file = File(num_blocks=5000)
    space = SwapSpace(2000, 2000, file)
    for step in range(4):
        planned(space, step)
        for n in range(step * 500, (step + 1) * 500):
            space.save_prefix(n.to_bytes(4, "little"))
    planned(space, 4)
    planned(space, 5)
    assert len(file.log) == MOST_WRITES
    file.ended.extend((place, True) for _, place, _ in file.log)
    planned(space, 6)
    assert len(file.log) == 2 * MOST_WRITES
