"""The plugin's side of verl's interfaces; stand-ins for verl, which is no dependency."""

from __future__ import annotations

import asyncio
import importlib
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.serving.verl.server import RolloutServer, engine_config
from sametoken.types.outputs import CompletionOutput, RequestMetrics, RequestOutput

ROLLOUT = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": True,
    "enforce_eager": False,
    "tensor_model_parallel_size": 1,
    "seed": 7,
    "logprobs_mode": "processed_logprobs",
    "enable_rollout_routing_replay": True,
    "engine_kwargs": {"sametoken": {"speculative_config": "ngram", "block_size": 8}},
    "free_cache_engine": True,
}


class Replicas:
    """verl's registry of replicas."""

    loaders: dict = {}  # noqa: RUF012

    @classmethod
    def register(cls, name, loader) -> None:
        cls.loaders[name] = loader


class BaseRollout:
    """verl's base class."""

    def __init__(self, config, model_config, device_mesh) -> None:
        self.config = config


async def in_order(items):
    for item in items:
        yield item


@pytest.fixture
def rollout(monkeypatch):
    """The module of the trainer's side."""
    contents = {
        "verl": {},
        "verl.workers": {},
        "verl.workers.rollout": {},
        "verl.workers.rollout.base": {"_ROLLOUT_REGISTRY": {}, "BaseRollout": BaseRollout},
        "verl.workers.rollout.replica": {
            "RolloutReplica": object,
            "RolloutReplicaRegistry": Replicas,
        },
        "verl.workers.rollout.utils": {"ensure_async_iterator": in_order},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("plugin", "rollout"):
        monkeypatch.delitem(sys.modules, f"sametoken.serving.verl.{name}", raising=False)
    return importlib.import_module("sametoken.serving.verl.rollout")


def test_the_rollout_is_registered_by_its_name(rollout):
    names = sys.modules["verl.workers.rollout.base"]._ROLLOUT_REGISTRY
    module, _, name = names["sametoken", "async"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is rollout.ServerAdapter
    assert "sametoken" in Replicas.loaders


def test_weights_go_to_the_server_as_files_of_a_directory(rollout, monkeypatch):
    sent = {f"t{i}": torch.full((5,), float(i)) for i in range(5)}
    received, found = {}, []

    class Method:
        @staticmethod
        async def remote(directory, global_steps):
            files = sorted(Path(directory).iterdir())
            found.append((len(files), global_steps, directory))
            for file in files:
                received.update(load_file(file))

    servers = {"sametoken_server_3": SimpleNamespace(update_weights=Method)}
    monkeypatch.setattr(rollout, "ray", SimpleNamespace(get_actor=servers.__getitem__))
    monkeypatch.setattr(rollout, "_FILE_BYTES", 40)
    monkeypatch.setenv("RANK", "3")
    adapter = rollout.ServerAdapter(SimpleNamespace(**ROLLOUT), None, None)
    asyncio.run(adapter.update_weights(iter(sent.items()), global_steps=9, peft_config=None))
    assert received.keys() == sent.keys()
    assert all(torch.equal(received[name], one) for name, one in sent.items())
    ((num_files, steps, directory),) = found
    assert (num_files, steps, Path(directory).exists()) == (3, 9, False)
    for more in ({"wire_format": "delta_flush"}, {"peft_config": {}}):
        with pytest.raises(UnsupportedError, match="merge"):
            asyncio.run(adapter.update_weights(iter(()), **more))


def test_the_engine_has_the_rollouts_options_and_its_own():
    config = engine_config(SimpleNamespace(**ROLLOUT), "m")
    assert (config.model, config.max_model_len, config.seed, config.block_size) == ("m", 128, 7, 8)
    assert config.enable_return_routed_experts
    assert config.speculative_config.method == "ngram"
    with pytest.raises(ConfigError, match="more"):
        engine_config(
            SimpleNamespace(**ROLLOUT | {"engine_kwargs": {"sametoken": {"more": 1}}}), "m"
        )


class Output(RequestOutput):
    """One that can be referred to weakly."""


def test_a_rollout_keeps_its_newest_output_alone():
    """Outputs are cumulative: all of them would take memory with the square of its length."""
    made, alive = [], []

    async def outputs(*given):
        for step in range(1, 40):
            reason = "length" if step == 39 else None
            completion = CompletionOutput(0, "", tuple(range(step)), reason)
            finished = reason is not None
            output = Output("r", None, (1,), (completion,), finished, RequestMetrics(0.0))
            made.append(weakref.ref(output))
            yield output
            alive.append(sum(one() is not None for one in made))

    server = RolloutServer(EngineConfig(model="m"), "127.0.0.1", lengths=(10, 100))
    resolved = SimpleNamespace(max_model_len=1000)
    server._engine = SimpleNamespace(resolved=resolved, generate=outputs)
    answer = asyncio.run(server.answer([1], {}, "r"))
    assert len(answer["token_ids"]) == 39
    assert max(alive) - min(alive) <= 1
