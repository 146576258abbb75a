"""Where a grammar is tried before it is used: in a thread, or in a process that can be killed."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sametoken.errors import OverloadedError, RequestError
from sametoken.io.child_process import (
    spawn,
    status_text,
)
from sametoken.text.grammar.compiled import Vocabulary
from sametoken.text.grammar.grammar import XGrammar

#: Seconds until a grammar is refused as too large, and trials at once.
TIME_LIMIT = 10.0
AT_ONCE = 2

#: Bytes by which a process may have grown after a trial; another one takes its place then.
MAX_GROWTH = 2**29
#: Seconds that a process may take to start: it imports what compiles.
_START_S = 120.0
_GRACE_S = 5.0
_MODULE = "sametoken.text.grammar.trial_main"


class ThreadTrials:
    """``GrammarTrials`` for programs, which harm only themselves: in a thread of this process."""

    def __init__(self) -> None:
        self._turns = threading.BoundedSemaphore(AT_ONCE)

    def start(self, vocabulary: Vocabulary) -> None:
        """See ``GrammarTrials``; there is nothing to do."""

    def run(self, grammar: XGrammar) -> None:
        """See ``GrammarTrials``; ``grammar`` is compiled then."""
        _take_turn(self._turns)
        outcome: Future[None] = Future()

        def work() -> None:
            try:
                grammar.require_sound()
                outcome.set_result(None)
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                self._turns.release()

        # A daemon, since a compilation cannot be stopped; it ends behind a refused request.
        threading.Thread(target=work, name="compile-grammar", daemon=True).start()
        try:
            outcome.result(TIME_LIMIT)
        except TimeoutError as error:
            raise _too_slow(grammar) from error


class ProcessTrials:
    """``GrammarTrials`` for servers: processes, started when first needed and killed when slow."""

    def __init__(self) -> None:
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self._idle: list[TrialProcess] = []
        self._busy: set[TrialProcess] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def run(self, grammar: XGrammar) -> None:
        """See ``GrammarTrials``; memory is bounded too."""
        _take_turn(self._turns)
        try:
            process = self._take(grammar.vocabulary)
            try:
                process.run(grammar)
            finally:
                self._put_back(process)
        finally:
            self._turns.release()

    def start(self, vocabulary: Vocabulary) -> None:
        """See ``GrammarTrials``: a process takes seconds to start."""
        self._put_back(self._take(vocabulary))

    def stop(self) -> None:
        """Kill the processes; trials under way fail."""
        with self._lock:
            self._stopped = True
            for process in (*self._idle, *self._busy):
                process.kill()
            self._idle.clear()

    def _take(self, vocabulary: Vocabulary) -> TrialProcess:
        with self._lock:
            if self._stopped:
                raise OverloadedError("the server ends", "use another one")
            self._idle = [process for process in self._idle if process.is_well()]
            process = self._idle.pop() if self._idle else _started()
            self._busy.add(process)
        try:
            process.await_ready(vocabulary)
        except BaseException:
            process.kill()
            self._put_back(process)
            raise
        return process

    def _put_back(self, process: TrialProcess) -> None:
        with self._lock:
            self._busy.discard(process)
            if process.num_bytes() > process.num_bytes_ready + MAX_GROWTH:
                process.kill()
            if process.is_alive:
                self._idle.append(process)


class TrialProcess:
    """One process that tries grammars, one after the other.

    A socket pair joins it: it ends when this process does.

    Attributes:
        num_bytes_ready: what it held before its first trial.
    """

    def __init__(self) -> None:
        self.num_bytes_ready = 0
        ours, theirs = socket.socketpair()
        with theirs:
            self._process: subprocess.Popen[bytes] = spawn(_MODULE, theirs.fileno())
        self._connection = Connection(ours.detach())
        self._is_ready = False
        self.is_alive = True

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def is_well(self) -> bool:
        """Whether it waits for a grammar; it may have died since the last one."""
        return self._process.poll() is None

    def num_bytes(self) -> int:
        """Resident memory; 0 where the system does not say, and of a process that has ended."""
        try:
            resident = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return resident * resource.getpagesize()

    def await_ready(self, vocabulary: Vocabulary) -> None:
        """Wait until it has begun, and knows what grammars are over.

        Raises:
            OverloadedError: it cannot start.
        """
        if self._is_ready:
            return
        try:
            self._ask(vocabulary, _START_S)
        except (EOFError, OSError) as error:
            raise OverloadedError(
                f"the grammar compiler cannot be started: {self._end()}", "try again later"
            ) from error
        self._is_ready = True
        self.num_bytes_ready = self.num_bytes()

    def run(self, grammar: XGrammar) -> None:
        """Try a grammar; the process is killed if that takes too long.

        Raises:
            RequestError: it is not sound, or takes too much time or memory.
            OverloadedError: there is no room for it.
        """
        try:
            refusal = self._ask(grammar.source, TIME_LIMIT)
        except TimeoutError as error:
            self.kill()
            raise _too_slow(grammar) from error
        except (EOFError, OSError) as error:
            raise RequestError(
                f"structured_outputs {grammar.source.kind} broke the grammar compiler: "
                f"{self._end()}",
                "make it smaller",
            ) from error
        if refusal is not None:
            raise refusal

    def kill(self) -> None:
        """End it at once; whoever waits for it learns so."""
        self.is_alive = False
        self._process.kill()
        self._process.wait()

    def _ask(self, question: object, timeout_s: float) -> Any:
        self._connection.send(question)
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv()

    def _end(self) -> str:
        """How it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.kill()
        return status_text(self._process.returncode)


def _started() -> TrialProcess:
    try:
        return TrialProcess()
    except OSError as error:
        raise OverloadedError(
            f"the grammar compiler cannot be started: {error}", "try again later"
        ) from error


def _take_turn(turns: threading.BoundedSemaphore) -> None:
    if not turns.acquire(timeout=TIME_LIMIT):
        raise busy()


def busy() -> OverloadedError:
    """Every turn is taken, and has been for long."""
    return OverloadedError("other grammars are still being compiled", "try again later", TIME_LIMIT)


def _too_slow(grammar: XGrammar) -> RequestError:
    return RequestError(
        f"structured_outputs {grammar.source.kind} took more than {TIME_LIMIT:.0f} s to compile",
        "make it smaller",
    )
