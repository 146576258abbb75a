"""A local Ray cluster under load: replicas are updated and killed, and a batch loses its engine."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import psutil
import pytest
import ray
from openai import OpenAI

from helpers.adapters import ATTENTION, write_adapter
from helpers.chat_model import write_chat_model
from helpers.http_server import TOY_ENGINE, free_port
from sametoken import LLM, SamplingParams
from sametoken.config import EngineConfig
from sametoken.serving.batch.config import BatchConfig
from sametoken.serving.batch.run import run_batch
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.limits import ServingLimits
from sametoken.serving.ray.config import RayConfig
from sametoken.serving.ray.serve import deploy, start_cluster

NUM_CLIENTS = 8
NUM_REQUESTS = 16
MAX_TOKENS = 128
#: New replicas take a busy machine minutes to start, and requests wait for a new gateway.
PATIENCE_S = 600
RAY_CONFIG = RayConfig(replicas=1, ray_num_cpus=0.25, ray_max_surge_percent=100)
TWO_REPLICAS = replace(RAY_CONFIG, replicas=2)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@dataclass(frozen=True)
class Case:
    """A prompt, the model or adapter that it asks, and the tokens that it has to get."""

    prompt: str
    seed: int
    asked: str
    token_ids: tuple[int, ...]


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("ray")
    model = write_chat_model(folder / "toy")
    own = {"lora_modules": {"sql": write_adapter(folder / "sql", model, ATTENTION)}}
    return EngineConfig.from_options(
        model=str(model), speculative_config=NGRAM, **own, **TOY_ENGINE
    )


@pytest.fixture(scope="module")
def cases(engine_config) -> list[Case]:
    """What an engine in this process says, without speculation."""
    llm = LLM(engine_config.model, lora_modules=engine_config.lora_modules, **TOY_ENGINE)
    adapters = [(None, "sql")[i % 2] for i in range(NUM_REQUESTS)]
    prompts = [f"request {i}: " + "abc " * i for i in range(NUM_REQUESTS)]
    params = [SamplingParams(max_tokens=MAX_TOKENS, seed=i) for i in range(NUM_REQUESTS)]
    outputs = llm.generate(prompts, params, lora_request=adapters)
    return [
        Case(prompts[i], i, adapters[i] or "toy", tuple(output.outputs[0].token_ids))
        for i, output in enumerate(outputs)
    ]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    start_cluster(
        num_cpus=2,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=directory,
    )
    yield
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def served(cluster, engine_config) -> ServerConfig:
    config = ServerConfig(port=free_port(), served_model_name=("toy",), log_level="error")
    deploy(engine_config, ServingLimits(), config, RAY_CONFIG)
    return config


def kill_one(title: str) -> None:
    """Kill one worker process of the cluster, whatever it is doing."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(word.startswith(title) for word in process.cmdline()):
                process.kill()
                return
    raise AssertionError(f"there is no {title}")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def client_of(config: ServerConfig) -> OpenAI:
    """A client that never asks twice."""
    url = f"http://127.0.0.1:{config.port}/v1"
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)


def ask(client: OpenAI, case: Case) -> tuple[int, ...]:
    answer = client.completions.create(
        model=case.asked,
        prompt=case.prompt,
        seed=case.seed,
        max_tokens=MAX_TOKENS,
        extra_body={"return_token_ids": True},
    )
    return tuple(answer.choices[0].token_ids)


def test_a_batch_goes_on_when_an_engine_dies(cluster, engine_config, cases, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {
            "custom_id": f"case-{case.seed}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": case.asked,
                "prompt": case.prompt,
                "seed": case.seed,
                "max_tokens": MAX_TOKENS,
                "return_token_ids": True,
            },
        }
        for case in cases
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = BatchConfig(("toy",), concurrency=4, ray=True, ray_num_cpus=0.5)
    recorded = tmp_path / "out.jsonl.parts" / "part-00000.jsonl"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_batch, engine_config, source, output, options)
        wait_for(lambda: running.done() or (recorded.exists() and recorded.stat().st_size > 0))
        assert not running.done()
        kill_one("ray::MapWorker(MapBatches(EngineActor))")
        summary = running.result()
    assert summary.num_answered == len(cases)
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [result["custom_id"] for result in results] == [line["custom_id"] for line in lines]
    choices = [result["response"]["body"]["choices"][0] for result in results]
    assert [tuple(choice["token_ids"]) for choice in choices] == [case.token_ids for case in cases]
    assert sorted(tmp_path.iterdir()) == [source, output]


def test_an_update_and_a_kill_under_load_lose_no_request(served, engine_config, cases):
    stop = threading.Event()

    def keep_asking(case: Case) -> int:
        count = 0
        # With a pause, or the new replicas start slowly beside the requests.
        while not count or not stop.wait(0.5):
            assert ask(client, case) == case.token_ids
            count += 1
        return count

    with client_of(served) as client, ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(keep_asking, case) for case in cases[:2]]
        try:
            newer = replace(served, served_model_name=("toy", "newer"))
            deploy(engine_config, ServingLimits(), newer, TWO_REPLICAS)
        finally:
            stop.set()
        assert all(future.result() for future in asking)
        assert [model.id for model in client.models.list()] == ["toy", "newer", "sql"]

    # Answers take long and one client serves all threads, so that the kill meets some of them.
    with client_of(served) as client, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        asked = [pool.submit(ask, client, case) for case in cases]
        wait_for(lambda: sum(future.done() for future in asked) >= NUM_CLIENTS // 2)
        kill_one("ray::ServeReplica:sametoken:replicas")
        assert [future.result() for future in asked] == [case.token_ids for case in cases]
