"""What a server logs while it serves: its load every ten seconds, and requests except polls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sametoken.serving.stats import EngineLoad, EngineStats
from sametoken.types.outputs import SpeculationMetrics

INTERVAL_S = 10.0
#: Paths that monitors and the built-in page read again and again.
POLLED = ("/health", "/ready", "/metrics")
_logger = logging.getLogger("sametoken.server")


class PollFilter(logging.Filter):
    """Leaves polls out of uvicorn's access log.

    Args:
        root_path: the path under which a proxy serves the API.
    """

    def __init__(self, root_path: str = "") -> None:
        super().__init__()
        self._paths = {root_path.rstrip("/") + path for path in POLLED} | set(POLLED)

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter``. The third argument of uvicorn's records is path and query."""
        arguments = record.args
        if not isinstance(arguments, tuple) or len(arguments) < 3:
            return True
        return str(arguments[2]).partition("?")[0] not in self._paths


class LoadLog:
    """Lines about the load, each of the time since the one before it.

    Args:
        stats: the statistics at the start.
        now: seconds of a monotonic clock.
    """

    def __init__(self, stats: EngineStats, now: float) -> None:
        self._last, self._time = stats, now
        self._was_busy = False

    def line(self, stats: EngineStats, now: float) -> str | None:
        """The next line. None while idle, after one line that says so."""
        last, seconds = self._last, max(now - self._time, 1e-9)
        self._last, self._time = stats, now
        num_in = stats.num_prompt_tokens - last.num_prompt_tokens
        num_out = stats.num_output_tokens - last.num_output_tokens
        load = stats.load
        in_engine = load.num_running + load.num_waiting + load.num_swapped
        is_busy, was_busy = bool(in_engine or num_in or num_out), self._was_busy
        self._was_busy = is_busy
        if not is_busy and not was_busy:
            return None
        parts = (
            f"running {load.num_running}, waiting {load.num_waiting + load.num_swapped}",
            f"tokens/s in {num_in / seconds:.1f}, out {num_out / seconds:.1f}",
            f"KV {load.kv_usage:.1%}{_hits(load, last.load)}",
            *_drafts(stats.speculation, last.speculation),
        )
        return "; ".join(parts)


def _hits(load: EngineLoad, last: EngineLoad) -> str:
    """The share of prompt tokens found in the prefix cache, if any were looked up."""
    num_queries = load.prefix_cache_queries - last.prefix_cache_queries
    num_hits = load.prefix_cache_hits - last.prefix_cache_hits
    # A restarted engine process counts from 0.
    if num_queries <= 0 or num_hits < 0:
        return ""
    return f", prefix cache hits {num_hits / num_queries:.1%}"


def _drafts(counters: SpeculationMetrics, last: SpeculationMetrics) -> tuple[str, ...]:
    """The drafts' acceptance, if any were offered."""
    recent = SpeculationMetrics(
        counters.num_steps - last.num_steps,
        counters.num_draft_tokens - last.num_draft_tokens,
        counters.num_accepted_tokens - last.num_accepted_tokens,
    )
    if not recent.num_draft_tokens:
        return ()
    return (
        f"drafts accepted {recent.acceptance_rate:.1%}, "
        f"acceptance length {recent.acceptance_length:.2f}",
    )


async def log_load(read: Callable[[], EngineStats], interval_s: float = INTERVAL_S) -> None:
    """Log a line of the load at each interval, until it is cancelled."""
    log = LoadLog(read(), time.monotonic())
    while True:
        await asyncio.sleep(interval_s)
        if (line := log.line(read(), time.monotonic())) is not None:
            _logger.info(line)
