"""Benchmark of a running server, measured by its clients."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

import sametoken
from sametoken.bench.http_client import NO_LIMITS, get
from sametoken.bench.openai_stream import (
    Endpoint,
    Load,
    LoadRun,
    ServedRequest,
    run_load,
    send,
    served_trace,
    traced_body,
)
from sametoken.bench.scrape import metrics_text, scrape
from sametoken.bench.serving_numbers import Goal, serving_numbers
from sametoken.bench.workload import CHAT, COMPLETIONS, Server, ServingWorkload
from sametoken.errors import ConfigError
from sametoken.io.bearer import bearer
from sametoken.io.json_text import parse_json
from sametoken.types.option_values import listed
from sametoken.types.sampling_params import derive_seed

_OURS = "sametoken"
_K = "num_speculative_tokens"
_JSON_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError)


def open_client(server: Server) -> httpx.AsyncClient:
    """Open a client without a connection limit and without proxies, which would add latency."""
    return httpx.AsyncClient(
        base_url=server.url,
        headers=bearer(server.api_key),
        timeout=server.timeout,
        limits=NO_LIMITS,
        trust_env=False,
    )


async def bench_serving(
    server: Server,
    workload: ServingWorkload,
    loads: Sequence[Load],
    goals: Sequence[Goal],
    *,
    announce: Callable[[str], None] = lambda text: None,
    advance: Callable[[], None] = lambda: None,
    keep: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Measure a server under each load in turn.

    Args:
        server: the server.
        workload: the requests.
        loads: one result per load.
        goals: latency bounds of requests that count for goodput.
        announce: called with a line if traces are missing.
        advance: called for each finished measured request.
        keep: called after each load with the object as it is by then, which outlives an interrupt.

    Returns:
        The object that ``sametoken.bench.documents`` describes.

    Raises:
        ConfigError: the server cannot be reached, or does not list the model.
    """
    prompts = workload.prompts()
    async with open_client(server) as client:
        about = await _describe(client, server)
        bench = _Bench(client, _endpoint(about, server, workload), workload, prompts, advance)
        document = _document(about, server, workload, goals)
        results, missing = document["results"], document["missing_loads"]
        missing += map(_load_json, loads)
        for load in loads:
            results.append(await bench.result(load, goals))
            del missing[0]
            keep(document)
        results[-1]["traces"] = await bench.traces(announce)
    return document


def _document(
    about: dict[str, Any], server: Server, workload: ServingWorkload, goals: Sequence[Goal]
) -> dict[str, Any]:
    """The object of a measurement that has no results yet."""
    return {
        "benchmark": f"serve, {workload.num_prompts} requests",
        "synthetic": about["synthetic"],
        "workload": _workload_json(workload, server, goals),
        "settings": about["settings"],
        "environment": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "sametoken": sametoken.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": about["device"],
        },
        "results": [],
        "missing_loads": [],
    }


def _load_json(load: Load) -> dict[str, Any]:
    return {"concurrency": load.concurrency, "request_rate": load.request_rate}


@dataclass(frozen=True, slots=True)
class _Bench:
    client: httpx.AsyncClient
    endpoint: Endpoint
    workload: ServingWorkload
    prompts: Sequence[str]
    advance: Callable[[], None]

    async def result(self, load: Load, goals: Sequence[Goal]) -> dict[str, Any]:
        """Measure one load: warm-up, then all repeats."""
        if self.workload.warmup:
            await self._run(replace(load, request_rate=None), self.workload.warmup, lambda: None)
        runs = []
        for _ in range(self.workload.repeats):
            before = await scrape(self.client)
            run = await self._run(load, self.workload.num_prompts, self.advance)
            after = await scrape(self.client)
            if before is not None and after is not None:
                counters = after.since(before)
                run.counters = None if counters.went_back else counters
            runs.append(run)
        totals = [dict(run.counters.totals) if run.counters else None for run in runs]
        return _load_json(load) | serving_numbers(runs, goals) | {"metrics": totals}

    async def traces(self, announce: Callable[[str], None]) -> list[dict[str, Any]]:
        """Send the first requests again, one at a time, and return their tokens and windows."""
        traces: list[dict[str, Any]] = []
        for index in range(min(self.workload.trace, len(self.prompts))):
            record = ServedRequest(index, 0.0)
            body = traced_body(self._body(index), is_chat=self.endpoint.is_chat)
            await send(self.client, self.endpoint, body, record)
            trace = served_trace(record)
            if trace is None:
                announce(f"no tokens of request {index}: {record.error or 'the server sends none'}")
                return traces
            traces.append(trace)
        return traces

    def _body(self, index: int) -> dict[str, Any]:
        workload = self.workload
        prompt, seed = self.prompts[index % len(self.prompts)], derive_seed(workload.seed, index)
        return self.endpoint.body(prompt, workload.output_len, workload.temperature, seed)

    async def _run(self, load: Load, count: int, advance: Callable[[], None]) -> LoadRun:
        bodies = [self._body(index) for index in range(count)]
        send_one = partial(send, self.client, self.endpoint)
        return await run_load(send_one, bodies, load, advance=advance)


def _endpoint(about: dict[str, Any], server: Server, workload: ServingWorkload) -> Endpoint:
    extra = ({"ignore_eos": True} if workload.ignore_eos else {}) | server.extra
    path = "/v1/chat/completions" if workload.is_chat else "/v1/completions"
    return Endpoint(path, about["model"], workload.is_chat, about["is_ours"], extra)


async def _describe(client: httpx.AsyncClient, server: Server) -> dict[str, Any]:
    """Read model, device and settings from the server.

    Raises:
        ConfigError: it does not answer, or does not list the model.
    """
    try:
        # The standard parser overflows the stack where values are nested deeply.
        cards = parse_json(await get(client, "/v1/models"))["data"]
        names = [card["id"] for card in cards]
        first = names[0]
    except httpx.HTTPStatusError as error:
        remedy = "give the address of an OpenAI-compatible server"
        if error.response.status_code in (401, 403):
            remedy = "give the server's key with --api-key"
        status = f"status {error.response.status_code}"
        raise ConfigError(f"{server.url} lists no models ({status})", remedy) from error
    except (httpx.HTTPError, *_JSON_ERRORS) as error:
        raise ConfigError(
            f"{server.url} lists no models ({type(error).__name__}: {error})",
            "give the address of an OpenAI-compatible server that is up",
        ) from error
    model = server.model or first
    if model not in names:
        raise ConfigError(f"{server.url} does not serve {model!r}", f"use {listed(names)}")
    info = await _engine_info(client)
    synthetic = info.get("synthetic", "nothing")
    method = info.get("method", "none")
    config = None if method == "none" else {"method": method, _K: info[_K]}
    return {
        "model": model,
        "is_ours": any(card.get("owned_by") == _OURS for card in cards),
        "synthetic": [] if synthetic == "nothing" else synthetic.split(", "),
        "device": info.get("device"),
        "settings": {
            "asked": {"model": model, "speculative_config": config},
            "server": {"url": server.url, "owned_by": cards[0].get("owned_by")} | info,
        },
    }


async def _engine_info(client: httpx.AsyncClient) -> dict[str, Any]:
    """Read the ``engine_info`` labels of our ``/metrics``; empty if there are none like ours."""
    try:
        for family in text_string_to_metric_families(await metrics_text(client)):
            if family.name == f"{_OURS}:engine_info":
                labels = family.samples[0].labels
                return {**labels, _K: int(labels.get(_K, 0))}
    except (httpx.HTTPError, *_JSON_ERRORS):
        return {}
    return {}


def _workload_json(
    workload: ServingWorkload, server: Server, goals: Sequence[Goal]
) -> dict[str, Any]:
    return asdict(workload) | {
        "path": None if workload.path is None else str(workload.path),
        "api": CHAT if workload.is_chat else COMPLETIONS,
        "goals": {goal.metric: goal.limit for goal in goals},
        "extra_body": server.extra,
    }
