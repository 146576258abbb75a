"""The ranks of one model: rank 0 leads, the others follow its plans.

Rank 0 runs the scheduler. It sends every plan to the followers before it enqueues the plan, so
that their hosts run ahead of their devices too, and waits for none of them. A socket pair
connects it to each: the kernel closes a dead process's end immediately.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from sametoken.config import EngineConfig
from sametoken.distributed.process_group import NoPeers, Peers, join, meeting
from sametoken.errors import EngineDeadError, SametokenError
from sametoken.io.child_process import (
    LENGTH,
    Failure,
    decode,
    encode,
    spawn,
    status_text,
)
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.runner.async_output import PendingOutput
from sametoken.runner.cpu_stream import CpuStream
from sametoken.runner.runner import Runner
from sametoken.runner.stream import (
    CudaStream,
    Event,
    ImmediateStream,
    LaggingStream,
    Stream,
    WatchedCudaStream,
)
from sametoken.types.plan import StepPlan

FOLLOWER_MODULE = "sametoken.engine.follower_main"
#: Seconds for a follower to exit, and to report its error after a connection broke.
_GRACE_S = 5.0

T = TypeVar("T")

# To a follower: Enlist, then the values of ``broadcast_object``, then plans and what is told.


@dataclass(frozen=True, slots=True)
class Enlist:
    """The first message: the follower's rank and the engine to build."""

    config: EngineConfig
    rank: int


# From a follower: Present, Number, Built, then what is collected, or at any time Failure.


@dataclass(frozen=True, slots=True)
class Present:
    """The process has started and selected its device."""


@dataclass(frozen=True, slots=True)
class Number:
    """This rank's operand of ``reduce_min``."""

    value: int


@dataclass(frozen=True, slots=True)
class Built:
    """The runner is built and ready for plans."""


class Ranks(Peers, Protocol):
    """Communication among the ranks of an engine while it is built and run.

    Attributes:
        parallel: this rank's tensor-parallel collectives.
    """

    parallel: TensorParallel

    def reduce_min(self, number: int) -> int:
        """The minimum of all ranks' numbers, on rank 0; other ranks get their own number."""
        ...

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        ...

    def tell(self, message: Any) -> None:
        """Send a message to the ranks that follow this one, in the order of the plans."""
        ...

    def collect(self, kind: type[T], wanted: Callable[[T], bool] | None = None) -> list[T]:
        """Wait for the answer of each rank that follows this one.

        Args:
            kind: of the answers.
            wanted: whether an answer is; others, left from earlier, are dropped. None: all are.

        Raises:
            SametokenError: one has ended; names the cause.
        """
        ...

    def stream(self, device: torch.device, steps_in_flight: int) -> Stream:
        """The stream on which this rank enqueues work."""
        ...

    def lead(self, runner: Runner) -> Runner:
        """The runner that sends every plan to all ranks."""
        ...

    def stopped_by_errors(self) -> AbstractContextManager[None]:
        """A block whose errors stop the other ranks and name the rank that failed first."""
        ...


class NoFollowers(NoPeers):
    """What a rank does for others, of one that none follows."""

    def tell(self, message: Any) -> None:
        """A no-op: nobody follows."""

    def collect(self, kind: type[T], wanted: object = None) -> list[T]:
        """Nothing: nobody follows."""
        return []

    def lead(self, runner: Runner) -> Runner:
        """The runner itself."""
        return runner

    def stopped_by_errors(self) -> AbstractContextManager[None]:
        """A no-op: rank 0 stops the others, if there are any."""
        return nullcontext()


class SoleRank(NoFollowers):
    """One process with the whole model."""

    parallel: TensorParallel = SINGLE_RANK

    def reduce_min(self, number: int) -> int:
        """The number."""
        return number

    def broadcast_object(self, value: T) -> T:
        """The value."""
        return value

    def stream(self, device: torch.device, steps_in_flight: int) -> Stream:
        """The device's stream; on a CPU a lagging one if several steps are in flight."""
        if device.type == "cuda":
            return CudaStream()
        return CpuStream() if steps_in_flight == 1 else LaggingStream()


class Follower:
    """Rank 0's handle of one follower; a thread reads its messages.

    Args:
        rank: the follower's.
        meeting: the descriptor that it inherits, by which it meets the other ranks.

    Attributes:
        ended: completes with the cause once the process has ended.
    """

    def __init__(self, rank: int, meeting: int) -> None:
        self.rank = rank
        self.ended: futures.Future[SametokenError] = futures.Future()
        self._process, self._sock = spawn(FOLLOWER_MODULE, meeting)
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read_all, name=f"rank {rank}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, frame: bytes) -> None:
        """Send an encoded message.

        Raises:
            SametokenError: the process has ended; names the cause.
        """
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise self.cause() from error

    def expect(self, kind: type[T], wanted: Callable[[T], bool] | None) -> T:
        """The next wanted message, of type ``kind`` as those before it.

        Raises:
            SametokenError: the process has ended; names the cause.
        """
        while True:
            message = self._messages.get()
            if not isinstance(message, kind):
                raise self.cause()
            if wanted is None or wanted(message):
                return message

    def cause(self) -> SametokenError:
        """Wait for the process to end and return the cause."""
        return self.ended.result()

    def hang_up(self) -> None:
        """Close the connection, at which the process exits."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Wait until the process has exited; kill it after a timeout."""
        self.hang_up()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._thread is not threading.current_thread():
            self._thread.join(_GRACE_S)
        self._sock.close()

    def _read_all(self) -> None:
        failure = None
        while (message := self._read()) is not None:
            if isinstance(message, Failure):
                failure = message.error
            else:
                self._messages.put(message)
            # While this waits it holds no error that was raised, and the engine in its frames.
            del message
        self.ended.set_result(failure or self._how_it_ended())
        self._messages.put(None)

    def _read(self) -> Any | None:
        with suppress(OSError):
            header = self._sock.recv(LENGTH.size, socket.MSG_WAITALL)
            if len(header) == LENGTH.size:
                (length,) = LENGTH.unpack(header)
                payload = self._sock.recv(length, socket.MSG_WAITALL)
                # Shorter if the process has ended in the midst of it.
                if len(payload) == length:
                    return decode(payload)
        return None

    def _how_it_ended(self) -> SametokenError:
        try:
            status = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            how = "no status"
        else:
            how = status_text(status)
        return EngineDeadError(
            f"rank {self.rank} of the model ended with {how}", "see its log; restart the engine"
        )


class LeadingRank:
    """Rank 0 of several; it starts and stops the others.

    The followers stop when it is stopped or garbage-collected, or when its process ends.

    Args:
        config: the engine that every rank builds, with sizes resolved and paths for names.
        device: the ranks' device type; each rank has its own GPU.

    Raises:
        SametokenError: a follower could not start; names the cause.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        size = config.tensor_parallel_size
        self._telling = threading.Lock()
        self.followers: list[Follower] = []
        self._end = weakref.finalize(self, _stop, os.getpid(), self.followers)
        try:
            own, others = meeting(size, device)
            for rank, other in enumerate(others, start=1):
                with other:
                    self.followers.append(Follower(rank, other.fileno()))
            for follower in self.followers:
                follower.send(encode(Enlist(config, follower.rank)))
            self.collect(Present)
            group = join(0, size, device, own, by_kernels=not config.disable_custom_all_reduce)
        except BaseException:
            self.stop()
            raise
        self.parallel: TensorParallel = group
        self.when_lost(lambda cause: group.abort())

    def reduce_min(self, number: int) -> int:
        """The minimum of all ranks' numbers."""
        return min(number, *(message.value for message in self.collect(Number)))

    def broadcast_object(self, value: T) -> T:
        """Send the value to all followers and return it."""
        self.tell(value)
        return value

    def stream(self, device: torch.device, steps_in_flight: int) -> Stream:
        """The device's stream; waiting on it fails once a follower has ended."""
        if device.type == "cuda":
            return WatchedCudaStream(self.check)
        # Waiting for other ranks looks like waiting for a core.
        return ImmediateStream() if steps_in_flight == 1 else LaggingStream()

    def lead(self, runner: Runner) -> Runner:
        """A runner that forwards every plan; waits until all followers are ready."""
        self.collect(Built)
        return LeadingRunner(runner, self)

    def tell(self, message: Any) -> None:
        """Send a message to all followers; any thread may do so."""
        frame = encode(message)
        with self._telling:
            for follower in self.followers:
                follower.send(frame)

    def collect(self, kind: type[T], wanted: Callable[[T], bool] | None = None) -> list[T]:
        """The next wanted message of each follower, of type ``kind``."""
        return [follower.expect(kind, wanted) for follower in self.followers]

    def when_lost(self, notice: Callable[[SametokenError], None]) -> None:
        """Call ``notice`` with the cause, on the follower's thread, once one has ended."""
        for follower in self.followers:
            follower.ended.add_done_callback(lambda ended: notice(ended.result()))

    def check(self) -> None:
        """Raise if a follower has ended.

        Raises:
            SametokenError: names the cause.
        """
        for follower in self.followers:
            if follower.ended.done():
                raise follower.cause()

    @contextmanager
    def stopped_by_errors(self) -> Iterator[None]:
        """On an error, stop all ranks and raise the cause of the rank that failed first."""
        try:
            yield
        except BaseException as error:
            # A broken connection is seen before the process that broke it has exited and its
            # status is known: wait for the status.
            if isinstance(error, RuntimeError):
                ended = [one.ended for one in self.followers]
                futures.wait(ended, 2 * _GRACE_S, futures.FIRST_COMPLETED)
            failed = [one for one in self.followers if one.ended.done()]
            cause = failed[0].cause() if failed and isinstance(error, Exception) else error
            self.stop()
            if cause is error:
                raise
            raise cause from error

    def stop(self) -> None:
        """Stop the followers."""
        self._end()


def _stop(owner: int, followers: Sequence[Follower]) -> None:
    # A fork shares the sockets: when it exits, it must not close its parent's connections.
    if os.getpid() != owner:
        return
    for follower in followers:
        follower.hang_up()
    for follower in followers:
        follower.stop()


@dataclass(frozen=True, slots=True)
class LeadingRunner:
    """Rank 0's runner: sends every plan to the followers, then to ``inner``."""

    inner: Runner
    ranks: LeadingRank

    def submit(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a step on every rank."""
        with self.ranks.stopped_by_errors():
            self.ranks.tell(plan)
            pending = self.inner.submit(plan)
        return replace(pending, landed=_Watched(pending.landed, self.ranks))


@dataclass(frozen=True, slots=True)
class _Watched:
    landed: Event
    ranks: LeadingRank

    def wait(self) -> None:
        """Wait; an error on any rank stops all ranks."""
        with self.ranks.stopped_by_errors():
            self.landed.wait()


def start_ranks(config: EngineConfig, device: torch.device) -> Ranks:
    """Start ``tensor_parallel_size`` ranks; this process is rank 0.

    Raises:
        SametokenError: a follower could not start; names the cause.
    """
    return SoleRank() if config.tensor_parallel_size == 1 else LeadingRank(config, device)
