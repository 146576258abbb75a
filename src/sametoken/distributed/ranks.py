"""The processes that share one model: rank 0 leads, the others follow its plans.

Rank 0 is the process of the scheduler. It sends every plan to the others before it enqueues
the plan itself, so their hosts run ahead of their devices as its own does, and it waits for
none of them. A socket pair joins it to each: the kernel closes a dead process's end at once.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import torch

from sametoken.config import EngineConfig
from sametoken.distributed.process_group import (
    NoPeers,
    Peers,
    ProcessGroup,
)
from sametoken.errors import EngineDeadError, SametokenError
from sametoken.io.child_process import (
    LENGTH,
    Failure,
    decode,
    encode,
    spawn,
)
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.runner.async_output import PendingOutput
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
#: Seconds that a follower has to end by itself, and to say why once it is missed.
_GRACE_S = 5.0

T = TypeVar("T")

# To a follower: Enlist, then what ``broadcast_object`` is called with, then plans.


@dataclass(frozen=True, slots=True)
class Enlist:
    """The first message: who the process is and what to build.

    Attributes:
        directory: where the ranks find each other.
    """

    config: EngineConfig
    rank: int
    directory: str


# From a follower: Present, Number, Built, or at any time Failure.


@dataclass(frozen=True, slots=True)
class Present:
    """The process runs and has its device."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the rank's own, of which the least is wanted."""

    value: int


@dataclass(frozen=True, slots=True)
class Built:
    """The runner is built; plans may come."""


class Ranks(Peers, Protocol):
    """What building an engine asks of the processes that share its model.

    Attributes:
        parallel: this process among them.
    """

    parallel: TensorParallel

    def reduce_min(self, number: int) -> int:
        """The least of all ranks' numbers; known to rank 0 alone."""
        ...

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        ...

    def stream(self, device: torch.device, steps_in_flight: int) -> Stream:
        """What this rank's work is enqueued on."""
        ...

    def lead(self, runner: Runner) -> Runner:
        """The runner that brings every plan to all ranks."""
        ...

    def stopped_by_errors(self) -> AbstractContextManager[None]:
        """Within, an error ends the other ranks, and says which rank failed first."""
        ...


class SoleRank(NoPeers):
    """One process with the whole model."""

    parallel: TensorParallel = SINGLE_RANK

    def reduce_min(self, number: int) -> int:
        """The number."""
        return number

    def broadcast_object(self, value: T) -> T:
        """The value."""
        return value

    def stream(self, device: torch.device, steps_in_flight: int) -> Stream:
        """The device's stream; on a CPU one that lags if steps are to be in flight."""
        if device.type == "cuda":
            return CudaStream()
        return ImmediateStream() if steps_in_flight == 1 else LaggingStream()

    def lead(self, runner: Runner) -> Runner:
        """The runner itself."""
        return runner

    def stopped_by_errors(self) -> AbstractContextManager[None]:
        """There is nobody to end."""
        return nullcontext()


class Follower:
    """One follower as rank 0 holds it; a thread reads what it says.

    Attributes:
        ended: done once the process has ended; its result says why.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended: futures.Future[SametokenError] = futures.Future()
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = spawn(FOLLOWER_MODULE, theirs.fileno())
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
            SametokenError: the process has ended, and why.
        """
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise self.cause() from error

    def expect(self, kind: type[T]) -> T:
        """The next message, which is of this kind.

        Raises:
            SametokenError: the process has ended, and why.
        """
        message = self._messages.get()
        if not isinstance(message, kind):
            raise self.cause()
        return message

    def cause(self) -> SametokenError:
        """Why the process has ended; waits until that is known."""
        return self.ended.result()

    def hang_up(self) -> None:
        """Let the process end by itself."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Wait until the process has ended; kill it if it takes too long."""
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
        self.ended.set_result(failure or self._how_it_ended())
        self._messages.put(None)

    def _read(self) -> Any | None:
        with suppress(OSError):
            header = self._sock.recv(LENGTH.size, socket.MSG_WAITALL)
            if len(header) == LENGTH.size:
                (length,) = LENGTH.unpack(header)
                return decode(self._sock.recv(length, socket.MSG_WAITALL))
        return None

    def _how_it_ended(self) -> SametokenError:
        try:
            status = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            how = "no status"
        else:
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return EngineDeadError(
            f"rank {self.rank} of the model ended with {how}", "see its log; restart the engine"
        )


class LeadingRank:
    """Rank 0 of several, which starts and ends the others.

    They end with it: when it is stopped, collected, or its process ends in any way.

    Args:
        config: what every rank builds, with sizes decided and paths instead of names.
        device: where the ranks run; each has a GPU of its own.

    Raises:
        SametokenError: a follower could not start, and why.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        size = config.tensor_parallel_size
        directory = TemporaryDirectory(prefix="sametoken-")
        self.followers = tuple(Follower(rank) for rank in range(1, size))
        self._end = weakref.finalize(self, _stop, os.getpid(), self.followers, directory)
        try:
            for follower in self.followers:
                follower.send(encode(Enlist(config, follower.rank, directory.name)))
            self._expect(Present)
            group = ProcessGroup(0, size, device, Path(directory.name))
        except BaseException:
            self.stop()
            raise
        self.parallel: TensorParallel = group
        self.when_lost(lambda cause: group.abort())

    def reduce_min(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return min(number, *(message.value for message in self._expect(Number)))

    def broadcast_object(self, value: T) -> T:
        """The value, sent to all followers."""
        self.send(value)
        return value

    def stream(self, device: torch.device, steps_in_flight: int) -> Stream:
        """The device's stream; waiting for it ends when a follower does."""
        if device.type == "cuda":
            return WatchedCudaStream(self.check)
        return SoleRank().stream(device, steps_in_flight)

    def lead(self, runner: Runner) -> Runner:
        """A runner that sends every plan on, once all followers are ready for plans."""
        self._expect(Built)
        return LeadingRunner(runner, self)

    def send(self, message: Any) -> None:
        """Send a message to all followers."""
        frame = encode(message)
        for follower in self.followers:
            follower.send(frame)

    def when_lost(self, notice: Callable[[SametokenError], None]) -> None:
        """Have ``notice`` called with the cause, on the follower's thread, once one has ended."""
        for follower in self.followers:
            follower.ended.add_done_callback(lambda ended: notice(ended.result()))

    def check(self) -> None:
        """Raise if a follower has ended.

        Raises:
            SametokenError: why it did.
        """
        for follower in self.followers:
            if follower.ended.done():
                raise follower.cause()

    @contextmanager
    def stopped_by_errors(self) -> Iterator[None]:
        """After an error no rank can go on: end them, and say which of them failed first."""
        try:
            yield
        except BaseException as error:
            # A broken connection is noticed before the process that broke it is gone, and that
            # before its status is known.
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
        """End the followers."""
        self._end()

    def _expect(self, kind: type[T]) -> list[T]:
        return [follower.expect(kind) for follower in self.followers]


def _stop(owner: int, followers: tuple[Follower, ...], directory: TemporaryDirectory[str]) -> None:
    # A fork shares the sockets: at its end it must not hang up for the process that it left.
    if os.getpid() != owner:
        return
    for follower in followers:
        follower.hang_up()
    for follower in followers:
        follower.stop()
    directory.cleanup()


@dataclass(frozen=True, slots=True)
class LeadingRunner:
    """Rank 0's runner: every plan goes to the followers, then to ``inner``."""

    inner: Runner
    ranks: LeadingRank

    def submit(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a step on every rank."""
        with self.ranks.stopped_by_errors():
            self.ranks.send(plan)
            pending = self.inner.submit(plan)
        return replace(pending, landed=_Watched(pending.landed, self.ranks))


@dataclass(frozen=True, slots=True)
class _Watched:
    landed: Event
    ranks: LeadingRank

    def wait(self) -> None:
        """Wait; whatever goes wrong on any rank ends all."""
        with self.ranks.stopped_by_errors():
            self.landed.wait()


def start_ranks(config: EngineConfig, device: torch.device) -> Ranks:
    """As many ranks as ``tensor_parallel_size`` says, this process being the first.

    Raises:
        SametokenError: a follower could not start, and why.
    """
    return SoleRank() if config.tensor_parallel_size == 1 else LeadingRank(config, device)
