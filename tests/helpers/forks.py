"""Processes of this package as forks of one that has imported what they need.

To import torch takes a process seconds. Tests of servers start many; those of the command line
and of ``EngineProcess`` start them as users do.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from functools import lru_cache
from types import SimpleNamespace

import pytest

from sametoken.io import child_process

IMPORTED = (
    "sametoken.engine.build",
    "sametoken.engine.follower_main",
    "sametoken.serving.engine_main",
    "sametoken.text.grammar.trial_main",
)
_NUM_BYTES = 8


class Fork:
    """What this package uses of ``subprocess.Popen``, for ``python -m module number``."""

    def __init__(self, command: list[str], *, stdin: int, pass_fds: tuple[int], env: dict) -> None:
        assert stdin == subprocess.DEVNULL
        _, _, module, _ = command
        self._reports, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), *pass_fds, 1, 2)
            socket.send_fds(_parent(), [json.dumps([module, env, os.getcwd()]).encode()], fds)
        self._lock = threading.Lock()
        self.returncode: int | None = None
        self.pid = self._report(None)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._report(timeout)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _report(self, timeout: float | None) -> int:
        self._reports.settimeout(timeout)
        try:
            report = self._reports.recv(_NUM_BYTES)
        except (TimeoutError, BlockingIOError) as error:
            raise subprocess.TimeoutExpired("a fork", timeout) from error
        return int.from_bytes(report, "big", signed=True)


@lru_cache
def _parent() -> socket.socket:
    """The process that forks, by the socket that it reads; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


@pytest.fixture(scope="session", autouse=True)
def forks() -> None:
    """Processes of this package are forks."""
    with pytest.MonkeyPatch.context() as patch:
        popen = SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL)
        patch.setattr(child_process, "subprocess", popen)
        yield


def main(control: socket.socket) -> None:
    """Fork for each message, until the socket closes; returns in the forks, too."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            return
        if os.fork() == 0:
            control.close()
            fork(*json.loads(message), *fds)
            return
        for fd in fds:
            os.close(fd)


def fork(module: str, env: dict, directory: str, reports: int, fd: int, out: int, err: int) -> None:
    """Run a module in a process whose id and end a second one reports."""
    pid = os.fork()
    if pid:
        for one in (fd, out, err):
            os.close(one)
        os.write(reports, pid.to_bytes(_NUM_BYTES, "big", signed=True))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(reports, status.to_bytes(_NUM_BYTES, "big", signed=True))
        os._exit(0)
    os.close(reports)
    for number, one in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(one, number)
        os.close(one)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    sys.argv = [module, str(fd)]
    del sys.modules[module]
    sys.path[:] = [directory, *env["PYTHONPATH"].split(os.pathsep)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    main(socket.socket(fileno=int(sys.argv[1])))
