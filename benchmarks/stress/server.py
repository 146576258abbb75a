"""``sametoken serve`` in another process, and its memory, threads and file descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "prefill_chunk_size": 16,
    "block_size": 8,
    # Too few for 16 long requests: some are preempted.
    "num_kv_blocks": 60,
    "steps_in_flight": 2,
}
SERVING = {
    "port": 0,
    "shadow_audit_rate": 0.02,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
}
#: Timeout of any wait, generous for busy machines.
PATIENCE_S = 600.0
_ENGINE_MODULE = "sametoken.serving.engine_main"


class Server:
    """A server on the loopback.

    Args:
        model: as on its command line.
        log: file for its output.
        options: command-line options by field.
    """

    def __init__(self, model: str, log: Path, options: Mapping[str, Any]) -> None:
        self._log = log
        words = [model, *(word for item in options.items() for word in _option(*item))]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sametoken", "serve", *words], stdout=file, stderr=file
            )

    @property
    def log(self) -> str:
        """The output so far."""
        return self._log.read_text(errors="replace")

    @property
    def log_bytes(self) -> int:
        """Size of the output in bytes."""
        return self._log.stat().st_size

    def wait_for_url(self) -> str:
        """Wait until the server listens and return its URL."""
        deadline = time.monotonic() + PATIENCE_S
        while "Application startup complete" not in self.log:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server does not start:\n{self.log}")
            time.sleep(0.05)
        return re.search(r"at (http://\S+)", self.log)[1]

    def engine_pid(self) -> int | None:
        """Return the pid of the engine process; None without one."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if _ENGINE_MODULE in child.cmdline():
                    return child.pid
        return None

    def kill_engine(self) -> bool:
        """Send SIGKILL to the engine process; return whether there was one."""
        pid = self.engine_pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None

    def sample(self) -> dict[str, float]:
        """Sample resident memory in MiB, threads and descriptors of its processes."""
        serving = psutil.Process(self.process.pid)
        engine_pid = self.engine_pid()
        held = {"engine_mib": 0.0, "others_mib": 0.0, "engine_threads": 0, "engine_descriptors": 0}
        for child in serving.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                mib = child.memory_info().rss / 2**20
                if child.pid == engine_pid:
                    held["engine_mib"] = mib
                    held["engine_threads"] = child.num_threads()
                    held["engine_descriptors"] = child.num_fds()
                else:
                    held["others_mib"] += mib
        return held | {
            "server_mib": serving.memory_info().rss / 2**20,
            "server_threads": serving.num_threads(),
            "server_descriptors": serving.num_fds(),
        }


@contextlib.contextmanager
def serving(model: str, **options: Any) -> Iterator[Server]:
    """Run a server, and kill it at the end if it is still running.

    Args:
        model: as on its command line.
        options: command-line options in addition to ``ENGINE`` and ``SERVING``.
    """
    with tempfile.TemporaryDirectory() as directory:
        server = Server(model, Path(directory) / "server.log", ENGINE | SERVING | options)
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()


def _option(name: str, value: Any) -> list[str]:
    """Return the command-line words of one option."""
    flag = f"--{name.replace('_', '-')}"
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
