"""``/metrics``: the engine's statistics under vLLM's names, with the prefix ``sametoken:``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from sametoken.serving.http.times import PREFIX
from sametoken.serving.stats import EngineStats, Histogram
from sametoken.types.engine_summary import EngineSummary
from sametoken.types.outputs import SpeculationMetrics

_MODEL = "model_name"
_POSITION = "position"
#: Shown from the start: Prometheus counts from a series' first value, so it would miss the request
#: that begins one.
_REASONS = ("stop", "length", "abort", "error")


class EngineCollector(Collector):
    """A Prometheus collector that reads a snapshot of the engine at every scrape.

    Args:
        read: returns the snapshot.
        summary: the engine's settings.
        model: value of the ``model_name`` label.
    """

    def __init__(self, read: Callable[[], EngineStats], summary: EngineSummary, model: str) -> None:
        self._read = read
        self._summary = summary
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """All metrics with their current values."""
        stats = self._read()
        yield from self._load(stats)
        yield from self._tokens(stats)
        yield from self._speculation(stats.speculation)
        yield from self._audit(stats)
        yield self._histogram("step_time_seconds", "Time of the engine's steps.", stats.step_time)
        yield from self._infos()

    def _load(self, stats: EngineStats) -> Iterator[Metric]:
        load = stats.load
        yield self._gauge("num_requests_running", "Completions that run.", load.num_running)
        yield self._gauge("num_requests_waiting", "Completions that wait.", load.num_waiting)
        yield self._gauge(
            "num_requests_swapped", "Completions preempted at present.", load.num_swapped
        )
        yield self._gauge(
            "num_waiting_prompt_tokens", "Prompt tokens that wait.", load.num_waiting_tokens
        )
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks held, 0..1.", load.kv_usage)
        yield self._gauge(
            "cpu_cache_usage_perc", "Share of host blocks for swapped KV, 0..1.", load.swap_usage
        )
        yield self._counter("num_preemptions", "Preemptions.", load.num_preemptions)
        yield self._gauge("weight_version", "Version of the weights.", load.weight_version)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up.", load.prefix_cache_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", load.prefix_cache_hits)
        yield self._counter(
            "external_prefix_cache_hits",
            "Of them, those from swap space.",
            load.swapped_prefix_hits,
        )
        yield self._gauge("ready", "Whether requests are accepted.", int(stats.ready))
        yield self._counter("engine_restarts", "Engine processes restarted.", stats.num_restarts)

    def _tokens(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens)
        yield self._counter(
            "prompt_tokens_cached", "Prompt tokens from the prefix cache.", stats.num_cached_tokens
        )
        yield self._counter(
            "generation_tokens", "Tokens of answers, whole or not.", stats.num_output_tokens
        )
        finished = dict.fromkeys(_REASONS, 0) | dict(stats.num_finished)
        yield self._labelled(
            "request_success", "Finished requests.", "finished_reason", finished.items()
        )
        yield self._counter("requests_failed", "Requests lost with the engine.", stats.num_failed)
        yield self._counter("requests_refused", "Requests refused with 429.", stats.num_overloaded)
        yield self._counter(
            "wasted_rows", "Window rows of drafts that were not accepted.", stats.num_wasted_rows
        )

    def _speculation(self, counters: SpeculationMetrics) -> Iterator[Metric]:
        offered, accepted = counters.offered_per_position, counters.accepted_per_position
        yield self._counter("spec_decode_num_steps", "Sampling steps.", counters.num_steps)
        yield self._counter(
            "spec_decode_num_drafts", "Windows with drafts.", offered[0] if offered else 0
        )
        yield self._counter(
            "spec_decode_num_draft_tokens", "Drafts offered.", counters.num_draft_tokens
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Drafts accepted.", counters.num_accepted_tokens
        )
        for name, text, counts in (
            ("accepted", "Drafts accepted at a window position, from 0.", accepted),
            ("draft", "Drafts offered at a window position, from 0.", offered),
        ):
            yield self._labelled(
                f"spec_decode_num_{name}_tokens_per_pos", text, _POSITION, enumerate(counts)
            )
        rates = GaugeMetricFamily(
            PREFIX + "spec_decode_conditional_acceptance",
            "Drafts accepted at a position over those accepted at the one before it.",
            labels=[_MODEL, _POSITION],
        )
        for position, rate in enumerate(conditional_acceptance(offered, accepted)):
            rates.add_metric([self._model, str(position)], rate)
        yield rates
        yield self._gauge(
            "spec_decode_acceptance_length",
            "Tokens per step, the bonus counted.",
            counters.acceptance_length,
        )

    def _audit(self, stats: EngineStats) -> Iterator[Metric]:
        audit = stats.audit
        yield self._counter("shadow_audits", "Requests replayed plainly.", audit.num_audited)
        yield self._counter(
            "shadow_audit_differences", "Replays with another token.", audit.num_mismatched
        )
        yield self._counter(
            "shadow_audits_dropped", "Replays dropped before their end.", audit.num_dropped
        )
        yield self._gauge("shadow_audits_pending", "Replays pending.", audit.num_pending)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=[_MODEL])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[_MODEL])
        family.add_metric([self._model], value)
        return family

    def _labelled(
        self, name: str, text: str, label: str, values: Iterable[tuple[str | int, int]]
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[_MODEL, label])
        for key, value in values:
            family.add_metric([self._model, str(key)], value)
        return family

    def _histogram(self, name: str, text: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=[_MODEL])
        bounds = [*map(str, values.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(values.counts), strict=True))
        family.add_metric([self._model], buckets, values.total)
        return family

    def _infos(self) -> Iterator[Metric]:
        summary = self._summary
        yield self._info(
            "engine",
            "The engine's settings.",
            device=summary.device,
            dtype=summary.dtype,
            method=summary.method or "none",
            num_speculative_tokens=str(summary.num_speculative_tokens),
            synthetic=", ".join(summary.synthetic) or "nothing",
        )
        yield self._info(
            "cache_config",
            "KV blocks, and the tokens of one.",
            block_size=str(summary.block_size),
            num_gpu_blocks=str(summary.num_kv_blocks),
        )

    def _info(self, name: str, text: str, **labels: str) -> Metric:
        family = InfoMetricFamily(PREFIX + name, text)
        family.add_metric([], {_MODEL: self._model, **labels})
        return family


def conditional_acceptance(offered: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """Acceptance rate of drafts whose predecessors were all accepted, by position from 0.

    If windows differ in length, the rate is a lower bound: a window that ended before a position
    counts as refused there.
    """
    reached = [*offered[:1], *accepted]
    return [a / before if before else 0.0 for a, before in zip(accepted, reached, strict=False)]


def make_registry(
    read: Callable[[], EngineStats], summary: EngineSummary, model: str
) -> CollectorRegistry:
    """A separate registry, so that one process can hold several servers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(read, summary, model))
    return registry
