"""Child processes of one program, each joined to its parent by a socket pair that carries messages.

A frame is its length in bytes, 8 bytes big-endian, and a pickle of one message. Both ends are
processes of one program on one socket pair that nobody else can open.
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
from dataclasses import dataclass
from typing import Any

from sametoken.errors import SametokenError

LENGTH = struct.Struct(">Q")
#: Reports that may wait for the serving process to read; then the steps wait too.
_MAX_UNREAD = 64


@dataclass(frozen=True, slots=True)
class Failure:
    """The last message of an engine that could not be built, or whose step failed."""

    error: SametokenError


def encode(message: Any) -> bytes:
    """The frame of a message."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(payload)) + payload


def decode(payload: bytes | bytearray) -> Any:
    """The message of a frame without its length."""
    return pickle.loads(payload)


def spawn(module: str, fd: int) -> subprocess.Popen[bytes]:
    """Run a module of this package in a process that inherits the socket ``fd``."""
    # A fresh interpreter: forking a process with threads is unsafe, and multiprocessing's
    # spawn would run the user's main module again.
    return subprocess.Popen(
        [sys.executable, "-m", module, str(fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=(fd,),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def status_text(status: int) -> str:
    """How a process ended, from its status as ``Popen`` gives it: a signal's name or a number."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


class Inbox:
    """Messages of the serving process, read by a thread of their own."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read_first(self) -> Any:
        """The first message; the others are read by a thread from here on."""
        message = self._read()
        threading.Thread(target=self._read_on, name="inbox", daemon=True).start()
        return message

    def put(self, message: Any) -> None:
        """Add a message of this process's own; from any thread."""
        self._messages.put(message)

    def take(self, *, wait: bool) -> list[Any]:
        """All messages that have come; with ``wait`` at least one."""
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
        """So many bytes. Once nobody is left to read results the process ends here."""
        received = bytearray(length)
        view = memoryview(received)
        while view:
            try:
                count = self._sock.recv_into(view)
            except OSError:
                count = 0
            if not count:
                os._exit(0)
            view = view[count:]
        return received


class Outbox:
    """Messages to the serving process, sent by a thread of their own."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._messages: queue.Queue[Any] = queue.Queue(_MAX_UNREAD)
        self._thread = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Send a message soon; waits while too many are unsent."""
        self._messages.put(message)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._messages.put(None)
        self._thread.join()

    def _send_all(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._sock.sendall(encode(message))
            except OSError:
                os._exit(0)


def take_socket(fd: int) -> socket.socket:
    """The inherited socket, whose other end decides when this process ends.

    A terminal's Ctrl-C and a service manager's stop reach every process of the group: they are
    ignored here.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    return sock
