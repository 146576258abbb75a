"""A follower rank: builds its shard of the model, then runs every plan that rank 0 sends.

Between plans it takes new weights.

Run as ``python -m sametoken.engine.follower_main FD MEETING``, of two inherited descriptors: a
socket whose first message is ``Enlist``, and what the ranks meet by. The process exits when the
socket closes, even if its device waits.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch

from sametoken.distributed.process_group import inherited, join
from sametoken.distributed.ranks import Built, Enlist, NoFollowers, Number, Present
from sametoken.engine.build import build_follower
from sametoken.engine.resolve import resolve_device
from sametoken.engine.shared_weights import FollowingWeights, LoadAdapter
from sametoken.engine.weights import Weights
from sametoken.errors import EngineDeadError, SametokenError
from sametoken.io.child_process import Failure, Inbox, send, take_socket
from sametoken.io.garbage import exempt_objects
from sametoken.layers.parallel import TensorParallel
from sametoken.runner.runner import Runner
from sametoken.runner.stream import CudaStream, ImmediateStream, Stream
from sametoken.types.plan import StepPlan

T = TypeVar("T")


class FollowingRank(NoFollowers):
    """``Ranks`` of a rank other than 0. Only rank 0 watches the processes."""

    def __init__(self, enlist: Enlist, sock: socket.socket, inbox: Inbox, meeting: int) -> None:
        size = enlist.config.tensor_parallel_size
        self._sock = sock
        self._messages = _one_by_one(inbox)
        self._device = device = resolve_device(enlist.config)
        if device.type == "cuda":
            torch.cuda.set_device(enlist.rank)
        self.send(Present())
        self.parallel: TensorParallel = join(
            enlist.rank,
            size,
            device,
            [inherited(meeting, device)],
            by_kernels=not enlist.config.disable_custom_all_reduce,
        )

    def reduce_min(self, number: int) -> int:
        """Send this rank's number to rank 0; returns it."""
        self.send(Number(number))
        return number

    def broadcast_object(self, value: T) -> T:
        """The value that rank 0 sent."""
        received: T = next(self._messages)
        return received

    def stream(self, device: torch.device, steps_in_flight: int) -> Stream:
        """A stream that runs work in the order of the plans."""
        return CudaStream() if device.type == "cuda" else ImmediateStream()

    def send(self, message: Any) -> None:
        """Send a message to rank 0."""
        send(self._sock, message)

    def follow(
        self, runner: Runner, weights: Weights, load_factors: LoadAdapter | None
    ) -> NoReturn:
        """Run plans until the process exits."""
        following = FollowingWeights(weights, load_factors, self._device, self.send)
        work: queue.SimpleQueue[StepPlan | Callable[[], None]] = queue.SimpleQueue()
        args = (self._messages, following, work)
        threading.Thread(target=_begin_or_queue, args=args, name="messages", daemon=True).start()
        self.send(Built())
        while True:
            item = work.get()
            if isinstance(item, StepPlan):
                runner.submit(item).discard()
            else:
                item()
            # While this waits it holds no second copy of the weights.
            del item


def _begin_or_queue(
    messages: Iterator[Any],
    following: FollowingWeights,
    work: queue.SimpleQueue[StepPlan | Callable[[], None]],
) -> None:
    """Begin what need not wait for the plans before it, and queue the rest in order."""
    for message in messages:
        item = message if isinstance(message, StepPlan) else following.begin(message)
        if item is not None:
            work.put(item)
        del item


def _one_by_one(inbox: Inbox) -> Iterator[Any]:
    while True:
        yield from inbox.take(wait=True)


def main(fd: int, meeting: int) -> int:
    """Follow rank 0 over the inherited socket; the exit status is 1 after a failure."""
    sock = take_socket(fd)
    inbox = Inbox(sock)
    enlist: Enlist = inbox.read_first()
    try:
        rank = FollowingRank(enlist, sock, inbox, meeting)
        built = build_follower(enlist.config, rank)
        exempt_objects()
        rank.follow(*built)
    except SametokenError as error:
        send(sock, Failure(error))
    except Exception as error:
        failure = EngineDeadError(f"rank {enlist.rank} failed: {error!r}", "see its log")
        send(sock, Failure(failure))
        raise
    return 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
