"""Processes of the program, forked from one that has imported what they import.

An engine's process takes 3.5 s of CPU time to import its libraries, and a process that tries
grammars 4 s. ``spawn`` of ``sametoken.io.child_process`` and a sweep start what they start without
this: a child of the process that asks, with its environment, the signals that it blocks, its
streams and the socket it passes on. The commands that tests run start their processes themselves.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

from sametoken.bench import sweep
from sametoken.io import child_process

_PR_SET_CHILD_SUBREAPER = 36
#: Variables that libraries read when they are imported.
_READ_AT_IMPORT = ("CUDA", "HF_", "LD_", "OMP_", "TORCH", "TRANSFORMERS_", "TRITON_")
_LARGEST_REQUEST = 2**17
_MOST_FDS = 5


def install() -> None:
    """Make this process start its processes so; on Linux, where orphans can be adopted."""
    if sys.platform == "linux":
        warm = SimpleNamespace(Popen=WarmProcess, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
        child_process.subprocess = sweep.subprocess = warm


class WarmProcess(subprocess.Popen):
    """``python -P -m MODULE FD ...``, forked where it would import the same."""

    def _execute_child(self, args, executable, preexec, close_fds, pass_fds, cwd, env, *others):
        server = _server()
        if not server.imports_the_same(env or os.environ):
            super()._execute_child(
                args, executable, preexec, close_fds, pass_fds, cwd, env, *others
            )
            return
        # Its ends of pipes; without one, that of this process.
        given = (others[3], others[6], others[8])
        streams = [number if end == -1 else end for number, end in enumerate(given)]
        self.pid = server.fork(args[args.index("-m") + 1], env or os.environ, *streams, *pass_fds)
        self._child_created = True
        self._close_pipe_fds(*others[3:9])


class _Server:
    """The process that forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._imported_with = _read_at_import(os.environ)
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            path = os.pathsep.join(path for path in sys.path if path)
            environment = os.environ | {"PYTHONPATH": path}
            passed = [theirs.fileno()]
            self._process = subprocess.Popen(command, env=environment, pass_fds=passed)
        atexit.register(self._stop)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _stop(self) -> None:
        self._sock.close()
        self._process.wait()

    def imports_the_same(self, env) -> bool:
        return _read_at_import(env) == self._imported_with

    def fork(self, module: str, env, *fds: int) -> int:
        """Process id of a child of this process; the first three are its streams."""
        mask = list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        request = json.dumps([module, dict(env), os.getcwd(), mask]).encode()
        with self._lock, _adopting():
            socket.send_fds(self._sock, [request], fds)
            return int(self._sock.recv(_LARGEST_REQUEST))


_server = cache(_Server)


def is_server(pid: int) -> bool:
    """Whether a child of this process is the one that forks."""
    return _server.cache_info().currsize > 0 and pid == _server().pid


def _read_at_import(env) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_IMPORT)}


@contextmanager
def _adopting():
    """Orphans of the block become children of this process."""
    control = ctypes.CDLL(None).prctl
    control(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        control(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(sock: socket.socket) -> None:
    """Fork for every request; returns in the process that runs a module, once it has."""
    while True:
        request, fds, _, _ = socket.recv_fds(sock, _LARGEST_REQUEST, _MOST_FDS)
        if not request:
            return
        read, write = os.pipe()
        parent = os.fork()
        if not parent:
            # An orphan at once, which the asking process adopts.
            if pid := os.fork():
                os.write(write, str(pid).encode())
                os._exit(0)
            for fd in (sock.detach(), read, write):
                os.close(fd)
            _run(json.loads(request), *fds)
            return
        os.waitpid(parent, 0)
        sock.send(os.read(read, 32))
        for fd in (*fds, read, write):
            os.close(fd)


def _run(request: list, *streams_and_fds: int) -> None:
    streams, fds = streams_and_fds[:3], streams_and_fds[3:]
    module, env, directory, mask = request
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path += [path for path in paths if path and path not in sys.path]
    for number, inherited in enumerate(streams):
        os.dup2(inherited, number)
        os.close(inherited)
    sys.argv = [module, *map(str, fds)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    import xgrammar  # noqa: F401

    import sametoken.engine.follower_main
    import sametoken.serving.engine_main  # noqa: F401

    gc.freeze()
    # Until a child has the mask of the thread that asks.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _serve(socket.socket(fileno=int(sys.argv[1])))
