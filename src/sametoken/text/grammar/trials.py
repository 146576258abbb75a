"""Validation of grammars before use, with a time limit: in a thread or in a killable process."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sametoken.errors import OverloadedError, RequestError, SametokenError, in_words
from sametoken.io.child_process import spawn, status_text
from sametoken.text.grammar.compiled import TokenizerText, Vocabulary
from sametoken.text.grammar.grammar import XGrammar

#: Seconds after which a grammar is refused as too large, and number of concurrent trials.
TIME_LIMIT = 10.0
AT_ONCE = 2

#: Bytes that a process may have grown by after a trial; beyond them it is replaced.
MAX_GROWTH = 2**29
#: Seconds that a process may take to start: it imports the compiler.
_START_S = 120.0
_GRACE_S = 5.0
_MODULE = "sametoken.text.grammar.trial_main"


class ThreadTrials:
    """``GrammarTrials`` in threads of this process, for offline inference."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(AT_ONCE)

    def pack(self, text: TokenizerText) -> Vocabulary:
        """See ``GrammarTrials``."""
        return text.pack()

    def run(self, grammar: XGrammar) -> None:
        """See ``GrammarTrials``; ``grammar`` is compiled in this process."""
        _acquire(self._slots)
        outcome: Future[None] = Future()

        def work() -> None:
            try:
                grammar.validate()
                outcome.set_result(None)
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                self._slots.release()

        # A daemon thread: a compilation cannot be stopped and outlives a refused request.
        threading.Thread(target=work, name="compile-grammar", daemon=True).start()
        try:
            outcome.result(TIME_LIMIT)
        except TimeoutError as error:
            raise _too_slow(grammar) from error


class ProcessTrials:
    """``GrammarTrials`` in processes, for servers: started on demand, killed when too slow."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._idle: list[TrialProcess] = []
        self._busy: set[TrialProcess] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def run(self, grammar: XGrammar) -> None:
        """See ``GrammarTrials``; memory is bounded too."""
        _acquire(self._slots)
        try:
            process = self._take(grammar.vocabulary)
            try:
                process.run(grammar)
            finally:
                self._put_back(process)
        finally:
            self._slots.release()

    def pack(self, text: TokenizerText) -> Vocabulary:
        """See ``GrammarTrials``; starting a process takes seconds."""
        process = self._take(text)
        self._put_back(process)
        return process.vocabulary

    def stop(self) -> None:
        """Kill the processes; running trials fail."""
        with self._lock:
            self._stopped = True
            for process in (*self._idle, *self._busy):
                process.kill()
            self._idle.clear()

    def _take(self, tokens: TokenizerText | Vocabulary) -> TrialProcess:
        with self._lock:
            if self._stopped:
                raise OverloadedError("the server ends", "use another one")
            self._idle = [process for process in self._idle if process.is_running()]
            process = self._idle.pop() if self._idle else _start_process()
            self._busy.add(process)
        try:
            process.await_ready(tokens)
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

    It ends with this process, to which a socket pair connects it.

    Attributes:
        num_bytes_ready: resident memory before its first trial.
        vocabulary: what its grammars are over, once it is ready.
    """

    vocabulary: Vocabulary

    def __init__(self) -> None:
        self.num_bytes_ready = 0
        self._process, sock = spawn(_MODULE)
        self._connection = Connection(sock.detach())
        self._is_ready = False
        self.is_alive = True

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the process exists; it may have died since its last trial."""
        return self._process.poll() is None

    def num_bytes(self) -> int:
        """Resident memory; 0 if unknown or if the process has ended."""
        try:
            resident = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return resident * resource.getpagesize()

    def await_ready(self, tokens: TokenizerText | Vocabulary) -> None:
        """Send the tokens and wait until the process is ready.

        Raises:
            RequestError: the tokenizer cannot be used.
            OverloadedError: it cannot start.
        """
        if self._is_ready:
            return
        try:
            answer = self._request(tokens, _START_S)
        except (EOFError, OSError) as error:
            raise OverloadedError(
                f"the grammar compiler cannot be started: {self._end()}", "try again later"
            ) from error
        if isinstance(answer, SametokenError):
            raise answer
        self.vocabulary = answer
        self._is_ready = True
        self.num_bytes_ready = self.num_bytes()

    def run(self, grammar: XGrammar) -> None:
        """Validate a grammar; kill the process if that takes too long.

        Raises:
            RequestError: it is not valid, or takes too much time or memory.
            OverloadedError: there is no memory for it.
        """
        try:
            error = self._request(grammar.source, TIME_LIMIT)
        except TimeoutError as timeout:
            self.kill()
            raise _too_slow(grammar) from timeout
        except (EOFError, OSError) as broken:
            raise RequestError(
                f"structured_outputs {grammar.source.kind} broke the grammar compiler: "
                f"{self._end()}",
                "make it smaller",
            ) from broken
        if error is not None:
            raise error

    def kill(self) -> None:
        """Kill the process; a running request to it fails."""
        self.is_alive = False
        self._process.kill()
        self._process.wait()

    def _request(self, message: object, timeout_s: float) -> Any:
        self._connection.send(message)
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv()

    def _end(self) -> str:
        """End the process; a description of its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.kill()
        return status_text(self._process.returncode)


def _start_process() -> TrialProcess:
    try:
        return TrialProcess()
    except OSError as error:
        raise OverloadedError(
            f"the grammar compiler cannot be started: {in_words(error)}", "try again later"
        ) from error


def _acquire(slots: threading.BoundedSemaphore) -> None:
    if not slots.acquire(timeout=TIME_LIMIT):
        raise busy()


def busy() -> OverloadedError:
    """The error when no trial may begin within the time limit."""
    return OverloadedError("other grammars are still being compiled", "try again later", TIME_LIMIT)


def _too_slow(grammar: XGrammar) -> RequestError:
    return RequestError(
        f"structured_outputs {grammar.source.kind} took more than {TIME_LIMIT:.0f} s to compile",
        "make it smaller",
    )
