"""Child processes, each connected to its parent by a socket pair that carries messages.

A frame is a length in bytes (8 bytes, big-endian) and a pickle of one message. Unpickling is
safe: both ends run this program, and no other process can open the socket pair.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from sametoken.errors import SametokenError

LENGTH = struct.Struct(">Q")
#: Unsent messages before ``Outbox.put`` blocks, and the engine's steps with it.
_MAX_UNREAD = 64
#: Ctrl-C and service managers signal the whole process group; the parent alone handles these.
_OF_THE_GROUP = (signal.SIGINT, signal.SIGTERM)
# Those that were made here and are still there.
_directories: weakref.WeakSet[TemporaryDirectory[str]] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Failure:
    """The last message of a process whose engine could not be built, or whose step failed."""

    error: SametokenError


def encode(message: Any) -> bytes:
    """The frame of a message."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(payload)) + payload


def decode(payload: bytes | bytearray) -> Any:
    """The message of a frame's payload."""
    return pickle.loads(payload)


def spawn(module: str, *inherited: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module of this package in a process; returns it and a socket to it.

    Its arguments are the number of its own socket, and the descriptors that it inherits beside. It
    calls ``ignore_signals`` once its imports, which take seconds, are done.

    Raises:
        OSError: the system has no room for it.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            return _run(module, (theirs.fileno(), *inherited)), ours
    except BaseException:
        ours.close()
        raise


def _run(module: str, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    # The child inherits the mask, so a signal cannot end it amid its imports.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_GROUP)
    try:
        # A new interpreter: forking a process with threads is unsafe, and multiprocessing's spawn
        # would run the user's main module again.
        return subprocess.Popen(
            [*module_command(module), *map(str, fds)],
            stdin=subprocess.DEVNULL,
            # Where this process began without one, the child's next file would take its place.
            stdout=None if sys.__stdout__ else subprocess.DEVNULL,
            stderr=None if sys.__stderr__ else subprocess.DEVNULL,
            pass_fds=fds,
            env=module_environment(),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def module_command(module: str) -> list[str]:
    """Runs a module in a new interpreter.

    Without ``-P`` it would import files of the current directory, which may be a checkpoint's.
    """
    return [sys.executable, "-P", "-m", module]


def module_environment() -> dict[str, str]:
    """The environment in which a new interpreter imports from where this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM, which this process's parent handles, and unblock them."""
    for number in _OF_THE_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_GROUP)


def status_text(status: int) -> str:
    """A ``Popen`` return code in words: the signal's name or number, or the exit status."""
    if status == -signal.SIGKILL:
        # The process itself cannot log why.
        return "SIGKILL, as Linux ends a process when memory runs out"
    # Real-time signals have no names.
    names = {number.value: number.name for number in signal.Signals}
    return names.get(-status, f"signal {-status}") if status < 0 else f"exit status {status}"


def temporary_directory(parent: Path, prefix: str) -> TemporaryDirectory[str]:
    """A directory that also goes when this process ends because its parent closed the socket.

    Raises:
        OSError: it cannot be made.
    """
    directory = TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    _directories.add(directory)
    return directory


def _end_with_parent() -> NoReturn:
    """End this process from any thread, whatever the others do; no exit handler runs."""
    try:
        for directory in list(_directories):
            directory.cleanup()
    finally:
        os._exit(0)


def send(sock: socket.socket, message: Any) -> None:
    """Send a message to the parent process. This one exits if the other end has closed."""
    try:
        sock.sendall(encode(message))
    except OSError:
        _end_with_parent()


class Inbox:
    """Messages from the parent process, read by a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read_first(self) -> Any:
        """Read the first message and start the thread that reads the others."""
        message = self._read()
        threading.Thread(target=self._read_on, name="inbox", daemon=True).start()
        return message

    def put(self, message: Any) -> None:
        """Add a message from this process; callable from any thread."""
        self._messages.put(message)

    def take(self, *, wait: bool) -> list[Any]:
        """All messages received so far; with ``wait`` at least one."""
        messages = [self._messages.get()] if wait else []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages

    def _read_on(self) -> None:
        while True:
            self._messages.put(self._read())

    def _read(self) -> Any:
        (length,) = LENGTH.unpack(self._read_exactly(LENGTH.size))
        return decode(self._read_exactly(length))

    def _read_exactly(self, length: int) -> bytearray:
        """Read ``length`` bytes. The process exits once the other end has closed."""
        received = bytearray(length)
        view = memoryview(received)
        while view:
            try:
                count = self._sock.recv_into(view)
            except OSError:
                count = 0
            if not count:
                _end_with_parent()
            view = view[count:]
        return received


class Outbox:
    """Messages to the parent process, sent by a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._messages: queue.Queue[Any] = queue.Queue(_MAX_UNREAD)
        self._thread = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Queue a message to send; blocks while too many are unsent."""
        self._messages.put(message)

    def close(self) -> None:
        """Wait until every message is sent."""
        self._messages.put(None)
        self._thread.join()

    def _send_all(self) -> None:
        while (message := self._messages.get()) is not None:
            send(self._sock, message)


def take_socket(fd: int) -> socket.socket:
    """The inherited socket; the process exits when the other end closes it."""
    ignore_signals()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    return sock
