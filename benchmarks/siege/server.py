"""``sametoken serve`` in a process of its own, and what it holds: memory, threads, descriptors."""

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
#: For what comes or never does, however busy the machine is.
PATIENCE_S = 600.0
_ENGINE_MODULE = "sametoken.serving.engine_main"


class Server:
    """A server on the loopback.

    Args:
        model: as on its command line.
        log: a file for what it prints.
        options: of its command line, by field.
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
        """What it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def log_bytes(self) -> int:
        """How much it has printed."""
        return self._log.stat().st_size

    def wait_for_url(self) -> str:
        """Where it listens, once it does."""
        deadline = time.monotonic() + PATIENCE_S
        while "Application startup complete" not in self.log:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server does not start:\n{self.log}")
            time.sleep(0.05)
        return re.search(r"at (http://\S+)", self.log)[1]

    def engine_pid(self) -> int | None:
        """The engine process; None while there is none."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if _ENGINE_MODULE in child.cmdline():
                    return child.pid
        return None

    def kill_engine(self) -> bool:
        """End the engine process as the kernel would; whether there was one."""
        pid = self.engine_pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None

    def sample(self) -> dict[str, float]:
        """What its processes hold now; memory in MiB, resident."""
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
    """A server, killed at the end if it has not ended.

    Args:
        model: as on its command line.
        options: of its command line beside those of ``ENGINE`` and ``SERVING``.
    """
    with tempfile.TemporaryDirectory() as directory:
        server = Server(model, Path(directory) / "server.log", ENGINE | SERVING | options)
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()


def _option(name: str, value: Any) -> list[str]:
    """The words of one option."""
    flag = f"--{name.replace('_', '-')}"
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
