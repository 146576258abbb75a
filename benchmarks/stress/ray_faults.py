"""Requests on a Ray cluster that grows, shrinks and loses nodes under load.

    python benchmarks/stress/ray_faults.py MODEL [--only autoscaling|serving|batch] [--json PATH]

autoscaling  one engine; load starts a second one, which stops when the load falls
serving      two nodes with an engine each; one node is killed under load, and another one joins
batch        ``sametoken batch --ray`` over two nodes, of which one is killed

The nodes are processes of this machine (``ray.cluster_utils``). Every answer must equal that of
an engine in this process without speculation; a request is sent again only if its stream broke
off, and every line of the batch must be answered once. Exits with 1 if anything is wrong. MODEL
needs a tokenizer and may be tiny.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Ray's processes read this at start: replicas report load every second instead of every ten.
os.environ.setdefault("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster
from stress import where

from sametoken import LLM, SamplingParams
from sametoken.config import EngineConfig
from sametoken.serving.batch.config import BatchConfig
from sametoken.serving.batch.run import run_batch
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.limits import ServingLimits
from sametoken.serving.ray.config import RayConfig
from sametoken.serving.ray.serve import APP, deploy

ENGINE = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 16, "num_kv_blocks": 1024}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
NUM_CASES = 64
MAX_TOKENS = 128
NUM_CLIENTS = 8
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Case:
    """A prompt and its expected tokens."""

    prompt: str
    seed: int
    token_ids: tuple[int, ...]

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "seed": self.seed,
            "max_tokens": MAX_TOKENS,
            "return_token_ids": True,
        }


@dataclass
class StatsCollector:
    """Outcomes of requests.

    Attributes:
        answered: number of answers by replica.
        wrong: seeds of cases with a wrong answer.
        failed: requests without an answer, and the reasons.
        sent_again: number of broken streams.
    """

    answered: Counter = field(default_factory=Counter)
    wrong: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    sent_again: int = 0

    @property
    def is_right(self) -> bool:
        return not (self.wrong or self.failed)


class BrokenStreamError(Exception):
    """A stream ended in an error event."""


def make_cases(model: str) -> list[Case]:
    """Make the cases, answered by an engine in this process without speculation."""
    llm = LLM(model, **ENGINE)
    prompts = [f"request {i}: " + "abc " * (i % 32) for i in range(NUM_CASES)]
    params = [SamplingParams(max_tokens=MAX_TOKENS, seed=i) for i in range(NUM_CASES)]
    outputs = llm.generate(prompts, params)
    return [
        Case(prompt, i, tuple(output.outputs[0].token_ids))
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


async def answer_of(client: httpx.AsyncClient, case: Case, *, stream: bool) -> tuple[str, Any]:
    """Send one request; return the replica and the token ids.

    Raises:
        BrokenStreamError: a stream broke off after its start.
        httpx.HTTPError: there is no answer.
    """
    body = case.body | {"stream": stream}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        text = (await response.aread()).decode()
        response.raise_for_status()
        replica = response.headers["x-sametoken-replica"]
    if not stream:
        return replica, tuple(json.loads(text)["choices"][0]["token_ids"])
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if "error" in events[-1]:
        raise BrokenStreamError
    return replica, tuple(id_ for event in events for id_ in event["choices"][0]["token_ids"])


async def send(
    client: httpx.AsyncClient, case: Case, tally: StatsCollector, *, stream: bool
) -> None:
    """Send one request, again if its stream breaks off."""
    while True:
        try:
            replica, token_ids = await answer_of(client, case, stream=stream)
        except BrokenStreamError:
            tally.sent_again += 1
            continue
        except httpx.HTTPError as error:
            tally.failed.append(f"{case.seed}: {error!r}")
            return
        tally.answered[replica] += 1
        if token_ids != case.token_ids:
            tally.wrong.append(case.seed)
        return


async def under_load(
    url: str, cases: Sequence[Case], num_clients: int, change: Callable[[], Awaitable[None]]
) -> StatsCollector:
    """Send requests while ``change`` runs, one at a time per client; return the outcomes."""
    tally, changed = StatsCollector(), False

    async def keep_sending(first: int) -> None:
        for number in range(first, sys.maxsize, num_clients):
            await send(client, cases[number % len(cases)], tally, stream=number % 2 == 0)
            if changed:
                return

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        sending = [asyncio.create_task(keep_sending(first)) for first in range(num_clients)]
        try:
            await change()
        finally:
            changed = True
            await asyncio.gather(*sending)
    return tally


async def until(condition: Callable[[], bool]) -> float:
    """Wait for a condition; return the seconds that it took."""
    began = time.perf_counter()
    while not await asyncio.to_thread(condition):
        if time.perf_counter() - began > PATIENCE_S:
            raise TimeoutError(f"{condition} does not become true")
        await asyncio.sleep(0.2)
    return time.perf_counter() - began


def num_running() -> int:
    """Count the running replicas of the engine."""
    deployments = serve.status().applications[APP].deployments
    return deployments["replicas"].replica_states.get("RUNNING", 0)


@contextlib.contextmanager
def nodes_of(*cpus: int) -> Iterator[Cluster]:
    """Run a cluster of nodes with these numbers of CPUs; the first is the head."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], **NODE})
    try:
        for num_cpus in cpus[1:]:
            cluster.add_node(num_cpus=num_cpus, **NODE)
        cluster.connect()
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def deployed(config: EngineConfig, ray_config: RayConfig) -> str:
    """Deploy a server on the cluster and return its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    server = ServerConfig(port=port, log_level="error")
    deploy(config, ServingLimits(), server, ray_config)
    return f"http://127.0.0.1:{port}"


async def autoscaling(config: EngineConfig, cases: Sequence[Case]) -> dict[str, Any]:
    """Load starts a second engine; with only two clients left it stops."""
    times: dict[str, float] = {}
    options = RayConfig(
        ray_min_replicas=1,
        ray_max_replicas=2,
        ray_target_ongoing_requests=2,
        ray_upscale_delay_s=1.0,
        ray_downscale_delay_s=5.0,
        ray_num_cpus=0.5,
    )

    async def grow() -> None:
        times["to two replicas, s"] = await until(lambda: num_running() == 2)
        # Until both have answered.
        await asyncio.sleep(5.0)

    async def shrink() -> None:
        times["to one replica again, s"] = await until(lambda: num_running() == 1)

    with nodes_of(2):
        url = deployed(config, options)
        before = num_running()
        busy = await under_load(url, cases, NUM_CLIENTS, grow)
        idle = await under_load(url, cases, 2, shrink)
    is_right = before == 1 and len(busy.answered) == 2 and busy.is_right and idle.is_right
    return {"is_right": is_right, **times, "busy": vars(busy), "idle": vars(idle)}


async def serving(config: EngineConfig, cases: Sequence[Case]) -> dict[str, Any]:
    """One of two nodes is killed under load, and later another one joins."""
    times: dict[str, float] = {}
    with nodes_of(1, 1) as cluster:
        url = deployed(config, RayConfig(replicas=2, ray_num_cpus=1.0))
        (node,) = cluster.worker_nodes

        async def lose() -> None:
            await asyncio.sleep(2.0)
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            times["to one replica, s"] = await until(lambda: num_running() == 1)
            await asyncio.sleep(2.0)

        async def join() -> None:
            # In this thread: it sets signal handlers, which only the main thread may do.
            cluster.add_node(num_cpus=1, **NODE)
            times["to two replicas again, s"] = await until(lambda: num_running() == 2)
            await asyncio.sleep(5.0)

        lost = await under_load(url, cases, NUM_CLIENTS, lose)
        joined = await under_load(url, cases, NUM_CLIENTS, join)
    both = len(lost.answered) == len(joined.answered) == 2
    is_right = both and lost.is_right and joined.is_right
    return {"is_right": is_right, **times, "lost": vars(lost), "joined": vars(joined)}


async def batch(config: EngineConfig, cases: Sequence[Case]) -> dict[str, Any]:
    """A node is killed after the first results; the output has each answer once, in order."""
    with nodes_of(1, 1) as cluster, tempfile.TemporaryDirectory() as directory:
        source, output = Path(directory) / "in.jsonl", Path(directory) / "out.jsonl"
        source.write_text("".join(_line(case) for case in cases))
        options = BatchConfig(concurrency=4, ray=True, replicas=2, ray_num_cpus=1.0)
        recorded = Path(directory) / "out.jsonl.parts" / "part-00000.jsonl"
        running = asyncio.create_task(asyncio.to_thread(run_batch, config, source, output, options))
        await until(lambda: running.done() or _num_lines(recorded) >= len(cases) // 8)
        num_before = _num_lines(recorded)
        (node,) = cluster.worker_nodes
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        began = time.perf_counter()
        summary = await asyncio.wait_for(running, PATIENCE_S)
        results = [json.loads(line) for line in output.read_text().splitlines()]
    ids = [result["custom_id"] for result in results]
    tokens = [tuple(one["response"]["body"]["choices"][0]["token_ids"]) for one in results]
    return {
        "is_right": ids == [f"case-{case.seed}" for case in cases]
        and tokens == [case.token_ids for case in cases]
        and summary.num_answered == len(cases),
        "lines": len(cases),
        "lines recorded before the loss": num_before,
        "from the loss to the end, s": time.perf_counter() - began,
    }


def _line(case: Case) -> str:
    line = {
        "custom_id": f"case-{case.seed}",
        "method": "POST",
        "url": "/v1/completions",
        "body": case.body,
    }
    return json.dumps(line) + "\n"


def _num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


SCENARIOS = {one.__name__: one for one in (autoscaling, serving, batch)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--only", choices=SCENARIOS, action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = str(Path(args.model).resolve())
    config = EngineConfig.from_options(model=model, speculative_config=NGRAM, **ENGINE)
    cases = make_cases(model)
    found: dict[str, Any] = {**where(), "ray": ray.__version__}
    for name in args.only or SCENARIOS:
        found[name] = asyncio.run(SCENARIOS[name](config, cases))
        print(name, json.dumps(found[name], indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(found[name]["is_right"] for name in args.only or SCENARIOS) else 1


if __name__ == "__main__":
    sys.exit(main())
