"""The results of a stress test and their limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attackers import Times
from crowd import ENGINE_CODES, StatsCollector

#: Gauges that must be 0 without requests.
LEFT = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "shadow_audits_pending",
)
RESTARTS, FAILED = "engine_restarts_total", "requests_failed_total"
DIFFERENCES, AUDITS = "shadow_audit_differences_total", "shadow_audits_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
COUNTED = (RESTARTS, FAILED, DIFFERENCES, AUDITS, ACCEPTED)
HELD = ("mib", "threads", "descriptors")
_NUM_SAMPLES_SHOWN = 120
_NUM_WORST = 5
#: A bomb may delay others until this long after its answer.
_ECHO_S = 0.5


@dataclass(frozen=True)
class Limits:
    """Upper limits.

    Attributes:
        health_s: the neighbour's slowest request to ``/health``.
        gap_s: its longest gap between two events of a stream.
        bomb_s: time of an answer to a hostile request.
        half_open_s: lifetime of a connection with an incomplete request.
        growth_mib: growth of a process's maximum memory, from the first half to the last quarter.
            Maxima and not medians, because a restarted engine begins small.
        peak_mib: peak memory of a process.
        growth_count: growth of threads and of descriptors, likewise.
        log_bytes: bytes of log per request.
        turned_away: the neighbour's streams that a full queue refuses while there is an engine.
    """

    health_s: float = 1.0
    gap_s: float = 2.0
    bomb_s: float = 20.0
    half_open_s: float = 120.0
    growth_mib: float = 48.0
    peak_mib: float = 1500.0
    growth_count: float = 8.0
    log_bytes: float = 500.0
    turned_away: int = 0


@dataclass
class StressResult:
    """The results of a stress test.

    Attributes:
        limits: upper limits.
        seconds: from the first request to the crowd's last.
        tally: outcomes of the requests.
        times: intervals without an engine process.
        num_kills: killed engine processes.
        samples: memory, threads and descriptors of the processes, every second.
        neighbour: "health", "waits" and "ends" of ``neighbour.Neighbour``.
        left: gauges at the end, which should be 0.
        counted: counters at the end.
        num_met: streams in flight at SIGTERM.
        exit_code: exit code of the server after SIGTERM; None if it did not exit.
        num_tracebacks, log_bytes: of the server's log.
    """

    limits: Limits
    seconds: float
    tally: StatsCollector
    times: Times
    num_kills: int
    samples: list[dict[str, float]]
    neighbour: dict[str, list]
    left: dict[str, float]
    counted: dict[str, float]
    num_met: int
    exit_code: int | None
    num_tracebacks: int
    log_bytes: int

    @property
    def is_right(self) -> bool:
        """Whether every criterion is met."""
        return all(one["passed"] for one in self.criteria().values())

    def criteria(self) -> dict[str, dict[str, Any]]:
        """Return by name: the value, its limit, and whether the limit holds."""
        tally, limits, seen = self.tally, self.limits, self.seen()
        num_sent = tally.sent.total()
        values = {
            "completed answers other than offline": (len(tally.wrong), 0),
            "cut answers that are no beginning": (len(tally.no_beginning), 0),
            "requests of the crowd lost": (len(tally.lost["crowd"]), 0),
            "bombs not refused in time": (len(tally.lost["bomber"]), 0),
            "half requests held": (len(tally.lost["half-openers"]), 0),
            "engines that did not come back": (len(tally.lost["killer"]), 0),
            "streams lost by SIGTERM": (len(tally.lost["drain"]), 0),
            "slowest /health of the neighbour, s": (seen["slowest health, s"], limits.health_s),
            "slowest token gap of the neighbour, s": (seen["slowest gap, s"], limits.gap_s),
            "faults that the neighbour saw": (seen["faults"].total(), 0),
            "streams of the neighbour turned away": (seen["turned away"], limits.turned_away),
            "gauges left": (sum(self.left.values()), 0),
            "engines that died by themselves": (self.counted[RESTARTS] - self.num_kills, 0),
            "requests lost without a kill": (0 if self.num_kills else self.counted[FAILED], 0),
            "replays that differ": (self.counted[DIFFERENCES], 0),
            "tracebacks in the log": (self.num_tracebacks, 0),
            "bytes of log per request": (self.log_bytes / num_sent, limits.log_bytes),
            "exit code after SIGTERM": (255 if self.exit_code is None else abs(self.exit_code), 0),
        }
        for name, value in self.growth().items():
            most = limits.growth_mib if name.endswith("mib") else limits.growth_count
            values[f"growth of {name}"] = (value, most)
        for name, value in self.peaks().items():
            if name.endswith("mib"):
                values[f"peak of {name}"] = (value, limits.peak_mib)
        return {
            name: {"found": value, "most": most, "passed": value <= most}
            for name, (value, most) in values.items()
        }

    def growth(self) -> dict[str, float]:
        """Compute the growth of the maxima from the first half to the last quarter."""
        quarter = len(self.samples) // 4
        early, late = self.samples[: 2 * quarter], self.samples[-quarter:]
        return {
            name: _highest(late, name) - _highest(early, name)
            for name in self.samples[0]
            if name.endswith(HELD)
        }

    def peaks(self) -> dict[str, float]:
        """Return the maxima of all samples."""
        names = [name for name in self.samples[0] if name.endswith(HELD)]
        return {name: max(sample[name] for sample in self.samples) for name in names}

    def seen(self) -> dict[str, Any]:
        """Summarize the neighbour's latencies and results; faults are unexpected results."""
        health, waits = self.neighbour["health"], self.neighbour["waits"]
        calm = [one for one in waits if not self.times.covers(one[0], one[0] + one[1])]
        gaps = [seconds for _, seconds, number in calm if number]
        firsts = [seconds for _, seconds, number in calm if not number]
        faults: Counter = Counter()
        turned_away = 0
        for began, seconds, status in health:
            away = self.times.covers(began, began + seconds)
            if status != 200 and not (away and status == 503):
                faults[f"/health: {status or 'no answer'}"] += 1
        for began, seconds, end in self.neighbour["ends"]:
            away = self.times.covers(began, began + seconds)
            # While the engine is away the queue fills, and then turns requests away.
            if end == "right" or (away and end in (*ENGINE_CODES, "overloaded")):
                continue
            if end == "overloaded":
                turned_away += 1
            else:
                faults[f"stream: {end}"] += 1
        return {
            "slowest looks": self._worst([(one[0], one[1]) for one in health]),
            "slowest gaps": self._worst([(one[0], one[1]) for one in calm if one[2]]),
            "health": len(health),
            "slowest health, s": max(seconds for _, seconds, _ in health),
            "99th percentile of health, s": _percentile([one[1] for one in health]),
            "gaps": len(gaps),
            "slowest gap, s": max(gaps),
            "99th percentile of gaps, s": _percentile(gaps),
            "slowest first token, s": max(firsts),
            "ends": Counter(end for _, _, end in self.neighbour["ends"]),
            "faults": faults,
            "turned away": turned_away,
        }

    def _worst(self, waits: list[tuple[float, float]]) -> list[dict[str, Any]]:
        """Return the longest waits, with the bombs in flight or just answered."""
        worst = sorted(waits, key=lambda one: -one[1])[:_NUM_WORST]
        return [
            {
                "seconds": seconds,
                "at_s": began - self.samples[0]["at_s"],
                "without an engine": self.times.covers(began, began + seconds),
                "bombs": [
                    name
                    for start, lasted, name in self.tally.thrown
                    if start <= began + seconds and began <= start + lasted + _ECHO_S
                ],
            }
            for began, seconds in worst
        ]

    def report(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        every = max(1, len(self.samples) // _NUM_SAMPLES_SHOWN)
        begin = self.samples[0]["at_s"]
        tally = self.tally
        return {
            "passed": self.is_right,
            "criteria": self.criteria(),
            "seconds": self.seconds,
            "requests": tally.sent.total(),
            "requests_per_second": tally.sent.total() / self.seconds,
            "sent": tally.sent,
            "fates": tally.fates,
            "statuses": tally.statuses,
            "bombs": tally.outcomes,
            "sent_again": tally.sent_again,
            "kills": self.num_kills,
            "seconds_without_engine": [end - start for start, end in self.times.windows],
            "slowest": tally.slowest_s,
            "neighbour": self.seen(),
            "wrong": _shown(tally.wrong),
            "no_beginning": _shown(tally.no_beginning),
            "lost": {kind: _shown(names) for kind, names in tally.lost.items()},
            "growth": self.growth(),
            "peaks": self.peaks(),
            "left": self.left,
            "counted": self.counted,
            "streams_met_by_sigterm": self.num_met,
            "exit_code": self.exit_code,
            "tracebacks": self.num_tracebacks,
            "log_bytes": self.log_bytes,
            "samples": [one | {"at_s": one["at_s"] - begin} for one in self.samples[::every]],
        }


def _shown(names: Sequence[str]) -> list[str]:
    """Return the first names."""
    return list(names[:20])


def _highest(samples: Sequence[dict[str, float]], name: str) -> float:
    return max((one[name] for one in samples), default=0.0)


def _percentile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) * 99 // 100] if values else 0.0
