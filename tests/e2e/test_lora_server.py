"""Adapters by the name of a model: over HTTP each gives the tokens that it gives alone."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from huggingface_hub import constants

from helpers.adapters import ATTENTION, write_adapter
from helpers.chat_model import write_chat_model
from helpers.events import events
from helpers.http_server import TOY_ENGINE, running_server
from helpers.hub import cache_snapshot
from sametoken import LLM, AsyncLLM, LoRARequest, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
PROMPT = "the inner the other the inner the other"
SAMPLING = {"temperature": 0.8, "seed": 5, "max_tokens": 24, "ignore_eos": True}


def alone(model: Path, adapter: str | None = None) -> tuple[int, ...]:
    """The tokens of an engine that has no other adapter, and no drafts."""
    modules = {} if adapter is None else {"only": adapter}
    chosen = adapter and LoRARequest("only", 1, adapter)
    with LLM(str(model), **TOY_ENGINE, lora_modules=modules) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(**SAMPLING), lora_request=chosen)
    return output.outputs[0].token_ids


def answered(client: httpx.Client, body: dict) -> tuple[int, ...]:
    """The tokens of a completion, whose answer or events name the model that was asked."""
    more = {"prompt": PROMPT, "return_token_ids": True} | SAMPLING
    answer = client.post("/v1/completions", json=more | body)
    assert answer.status_code == 200, answer.text
    parts = events(answer) if body["stream"] else [answer.json()]
    assert {part["model"] for part in parts} == {body["model"]}
    return tuple(token for part in parts for token in part["choices"][0]["token_ids"])


async def last_tokens(engine: AsyncLLM, adapter: str) -> tuple[int, ...]:
    params = SamplingParams(**SAMPLING)
    outputs = [one async for one in engine.generate(PROMPT, params, "own", lora_request=adapter)]
    return outputs[-1].outputs[0].token_ids


def test_adapters_and_the_model_answer_beside_each_other_as_alone(tmp_path, monkeypatch):
    model = write_chat_model(tmp_path / "model")
    paths = {
        "sql": write_adapter(tmp_path / "sql", model, ATTENTION, seed=1),
        "chat": write_adapter(tmp_path / "chat", model, ("down_proj",), seed=2),
    }
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    files = {path.name: path.read_bytes() for path in paths["chat"].iterdir()}
    cache_snapshot(tmp_path / "hub", "tiny/chat", files)
    expected = {
        "toy": alone(model),
        "sql": alone(model, str(paths["sql"])),
        "chat": alone(model, "tiny/chat"),
    }
    assert len(set(expected.values())) == 3, "an adapter changes nothing"
    bodies = [
        {"model": name, "stream": stream, "speculative": {"num_speculative_tokens": k}}
        for k in (4, 0)
        for stream in (False, True)
        for name in expected
    ]
    engine = {"speculative_config": NGRAM, "lora_modules": paths}
    with running_server(model, engine=engine, served_model_name=("toy",)) as server:
        with httpx.Client(base_url=server.url, timeout=120) as client, ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda body: answered(client, body), bodies))
        own = last_tokens(server.engine, "sql")
        assert asyncio.run_coroutine_threadsafe(own, server._loop).result(120) == expected["sql"]
    assert answers == [expected[body["model"]] for body in bodies]
