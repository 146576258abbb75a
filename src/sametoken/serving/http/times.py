"""Latency and size histograms of requests, as their clients see them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from sametoken.types.outputs import RequestMetrics, RequestOutput

PREFIX = "sametoken:"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_COMPLETIONS = (1, 2, 5, 10, 20)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class RequestTimes:
    """Histograms of requests, under vLLM's names.

    Args:
        registry: Prometheus registry for the histograms.
        model: value of the ``model_name`` label.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            whole = Histogram(
                PREFIX + name, text, ["model_name"], buckets=bounds, registry=registry
            )
            return whole.labels(model)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a finished request's tokens after the first.",
            _TOKEN_SECONDS,
        )
        self._between = histogram(
            "inter_token_latency_seconds",
            "Time between tokens; those of one step share theirs evenly, whole answers count once.",
            _TOKEN_SECONDS,
        )
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._queue = histogram(
            "request_queue_time_seconds",
            "From a finished request's arrival to its first step.",
            _SECONDS,
        )
        self._prefill = histogram(
            "request_prefill_time_seconds",
            "From a finished request's first step to its first token.",
            _SECONDS,
        )
        self._decode = histogram(
            "request_decode_time_seconds",
            "From a finished request's first token to its end.",
            _SECONDS,
        )
        self._inference = histogram(
            "request_inference_time_seconds",
            "From a finished request's first step to its end.",
            _SECONDS,
        )
        self._completions = histogram(
            "request_params_n", "Completions of a finished request.", _COMPLETIONS
        )
        self._prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS
        )
        self._output_tokens = histogram(
            "request_generation_tokens",
            "Output tokens of a finished request, all its completions together.",
            _TOKENS,
        )
        self._longest = histogram(
            "request_max_num_generation_tokens",
            "Output tokens of a finished request's longest completion.",
            _TOKENS,
        )

    def observe(self, before: RequestOutput | None, output: RequestOutput, gap_s: float) -> None:
        """Observe an output, given the request's previous output and the seconds between them."""
        metrics = output.metrics
        for index, completion in enumerate(output.outputs):
            count = completion.num_tokens
            count_before = before.outputs[index].num_tokens if before is not None else 0
            if count_before and count > count_before:
                self._between.observe(gap_s / (count - count_before))
        had_first = before is not None and before.metrics.first_token_time is not None
        if metrics.first_token_time is not None and not had_first:
            self._first_token.observe(metrics.first_token_time - metrics.arrival_time)
        if output.finished:
            self._finish(output, whole=not had_first)

    def _finish(self, output: RequestOutput, *, whole: bool) -> None:
        metrics = output.metrics
        counts = [completion.num_tokens for completion in output.outputs]
        self._completions.observe(len(counts))
        self._prompt_tokens.observe(len(output.prompt_token_ids))
        self._output_tokens.observe(sum(counts))
        self._longest.observe(max(counts))
        if metrics.finished_time is None:
            return
        self._observe_parts(metrics)
        self._whole.observe(metrics.finished_time - metrics.arrival_time)
        if metrics.first_token_time is not None and max(counts) > 1:
            mean = (metrics.finished_time - metrics.first_token_time) / (max(counts) - 1)
            self._per_token.observe(mean)
            if whole:
                self._between.observe(mean)

    def _observe_parts(self, metrics: RequestMetrics) -> None:
        arrival, begin = metrics.arrival_time, metrics.first_scheduled_time
        first, end = metrics.first_token_time, metrics.finished_time
        parts = (
            (self._queue, arrival, begin),
            (self._prefill, begin, first),
            (self._decode, first, end),
            (self._inference, begin, end),
        )
        for histogram, since, until in parts:
            # One that was aborted may lack some of them.
            if since is not None and until is not None:
                histogram.observe(until - since)
