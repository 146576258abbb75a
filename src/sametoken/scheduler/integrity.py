"""Checks of the scheduler's state: invariants that hold between any two of its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sametoken.errors import InvariantError
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.request_state import RequestState, Status


def check_blocks(
    running: Sequence[RequestState], lingering: Sequence[RequestState], limits: SchedulerLimits
) -> None:
    """Check that block tables cover all writes and share only blocks that are never written.

    Raises:
        InvariantError: a write would have no block, or would hit a shared one.
    """
    for request in running:
        # The drafter may look ahead to one token after a chunk.
        covered = request.reach + request.prefilling + limits.lookahead_slots
        if request.table_len < limits.blocks_for(covered):
            raise InvariantError(f"slot {request.slot} lacks blocks for {covered} positions")
    first_seen: dict[int, tuple[int, RequestState]] = {}
    for request in (*running, *lingering):
        for index, block in enumerate(request.blocks, request.num_dropped):
            seen_index, other = first_seen.setdefault(block, (index, request))
            if other is request and seen_index == index:
                continue
            floor = min(other.num_final, request.num_final)
            if other is request or seen_index != index or (index + 1) * limits.block_size > floor:
                raise InvariantError(
                    f"block {block} is shared by slots {other.slot} and {request.slot} "
                    f"at indices {seen_index} and {index}, final positions: {floor}"
                )


def check_slots(admitted: Sequence[RequestState], free_slots: Sequence[int], count: int) -> None:
    """Check that every slot is free or belongs to one request.

    Raises:
        InvariantError: a slot leaked or is owned twice.
    """
    slots = sorted([*free_slots, *(request.held_slot for request in admitted)])
    if slots != list(range(count)):
        raise InvariantError(f"slots {slots} are not 0..{count - 1}, each once")


def check_requests(
    running: Sequence[RequestState],
    swapped: Sequence[RequestState],
    waiting: Sequence[RequestState],
) -> None:
    """Check each list's statuses, and that running requests are older than swapped ones.

    Raises:
        InvariantError: a request is in the wrong list or out of order.
    """
    by_age = sorted(swapped, key=lambda request: request.admission)
    ages = [request.admission for request in (*running, *by_age)]
    if ages != sorted(set(ages)):
        raise InvariantError(f"requests are out of order of admission: {ages}")
    lists = ((Status.RUNNING, running), (Status.SWAPPED, swapped), (Status.WAITING, waiting))
    for status, requests in lists:
        for request in requests:
            name = f"request {request.request.request_id!r}"
            if request.status is not status:
                raise InvariantError(f"{name} is {request.status.value}, listed as {status.value}")
            if bool(request.blocks) != (status is Status.RUNNING):
                raise InvariantError(f"{name} is {status.value} with {len(request.blocks)} blocks")
            if request.saved and status is not Status.SWAPPED:
                raise InvariantError(f"{name} is {status.value} with saved KV {request.saved}")


def check_in_flight(
    admitted: Sequence[RequestState],
    lingering: Sequence[RequestState],
    in_flight: Sequence[RequestState],
) -> None:
    """Check the counts of steps in flight; released requests linger only while it is not 0.

    Raises:
        InvariantError: a count is wrong, or a request lingers without a step in flight.
    """
    num_steps = Counter(request.admission for request in in_flight)
    for request in admitted:
        if request.num_in_flight != num_steps[request.admission]:
            raise InvariantError(f"slot {request.slot} miscounts its steps in flight")
    for request in lingering:
        if not request.num_in_flight:
            raise InvariantError(f"slot {request.slot} lingers with nothing in flight")
