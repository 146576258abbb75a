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

from helpers.adapters import in_memory, write_adapter
from helpers.checkpoints import write_llama
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.load.adapter import open_adapter
from sametoken.serving.verl.server import (
    RolloutServer,
    engine_config,
    lora_rank_of,
    request_defaults,
)
from sametoken.types.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sametoken.types.sampling_params import replica_seed

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
    "repetition_penalty": 1.5,
    "ignore_eos": True,
    "quantization": None,
    "qat": None,
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


@pytest.fixture
def trainer(rollout, monkeypatch):
    """The trainer's side of a server, whose methods read what they are given with a function."""

    def made(**methods):
        def called(read):
            async def remote(directory, global_steps):
                read(Path(directory), global_steps)

            return SimpleNamespace(remote=remote)

        server = SimpleNamespace(**{name: called(read) for name, read in methods.items()})
        servers = {"sametoken_server_3": server}
        monkeypatch.setattr(rollout, "ray", SimpleNamespace(get_actor=servers.__getitem__))
        monkeypatch.setenv("RANK", "3")
        return rollout.ServerAdapter(SimpleNamespace(**ROLLOUT), None, None)

    return made


def test_weights_go_to_the_server_as_files_of_a_directory(rollout, trainer, monkeypatch):
    sent = {f"t{i}": torch.full((5,), float(i)) for i in range(5)}
    received, found = {}, []

    def read(directory, global_steps):
        files = sorted(directory.iterdir())
        found.append((len(files), global_steps, directory))
        for file in files:
            received.update(load_file(file))

    monkeypatch.setattr(rollout, "_FILE_BYTES", 40)
    adapter = trainer(update_weights=read)
    asyncio.run(adapter.update_weights(iter(sent.items()), global_steps=9, peft_config=None))
    assert received.keys() == sent.keys()
    assert all(torch.equal(received[name], one) for name, one in sent.items())
    ((num_files, steps, directory),) = found
    assert (num_files, steps, Path(directory).exists()) == (3, 9, False)
    with pytest.raises(UnsupportedError, match="differences"):
        asyncio.run(adapter.update_weights(iter(()), wire_format="delta_flush"))


def test_an_adapter_goes_to_the_server_as_peft_saves_it(trainer, tmp_path):
    """After the weights of its model, if the rollout lacks them."""
    path = write_adapter(tmp_path / "lora", write_llama(tmp_path / "llama"), ("q_proj",))
    own, found = in_memory(path), []

    def read_base(directory, global_steps):
        (file,) = directory.iterdir()
        found.append([*load_file(file)])

    def read(directory, global_steps):
        found.append((open_adapter(directory).read().modules, global_steps))

    adapter = trainer(update_weights=read_base, update_adapter=read)
    name = "model.layers.0.self_attn.q_proj"
    base = {f"{name}.base_layer.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(2)}
    for tensors, done in ((base, False), (own["tensors"], True)):
        more = {"peft_config": own["config"], "base_sync_done": done, "global_steps": 4}
        asyncio.run(adapter.update_weights(iter(tensors.items()), **more))
    assert sorted(found[0]) == [f"{name}.weight", "model.norm.weight"]
    (modules, steps), expected = found[1], open_adapter(path).read().modules
    assert (steps, modules.keys()) == (4, expected.keys())
    for name, one in expected.items():
        assert torch.equal(modules[name].down, one.down)
        assert (modules[name].scale, one.scale) == (0.5, 0.5)


def test_the_engine_has_the_rollouts_options_and_its_own():
    config = engine_config(SimpleNamespace(**ROLLOUT), "m")
    assert (config.model, config.max_model_len, config.seed, config.block_size) == ("m", 128, 7, 8)
    assert config.enable_return_routed_experts
    assert config.speculative_config.method == "ngram"
    assert not config.enable_lora
    for rank, lora in ((8, {}), (0, {"rank": 8, "merge": False})):
        adapted = lora_rank_of(SimpleNamespace(lora_rank=rank, lora=lora))
        config = engine_config(SimpleNamespace(**ROLLOUT), "m", adapted)
        assert (config.enable_lora, config.max_loras, config.max_lora_rank) == (True, 2, 8)
    assert lora_rank_of(SimpleNamespace(lora_rank=8, lora={"merge": True})) == 0
    with pytest.raises(ConfigError, match="more"):
        engine_config(
            SimpleNamespace(**ROLLOUT | {"engine_kwargs": {"sametoken": {"more": 1}}}), "m"
        )


@pytest.mark.parametrize("asked", [{"quantization": "fp8"}, {"qat": {"enable": True}}])
def test_a_quantization_of_verls_is_refused(asked):
    with pytest.raises(UnsupportedError, match="quantize"):
        engine_config(SimpleNamespace(**ROLLOUT | asked), "m")
    assert engine_config(SimpleNamespace(**ROLLOUT | {"qat": {"enable": False}}), "m")


def test_replicas_draw_seeds_of_their_own():
    """verl spreads the answers to one prompt over replicas: equal draws would be equal answers."""
    rollout = SimpleNamespace(**ROLLOUT)
    seeds = [engine_config(rollout, "m", replica_rank=rank).seed for rank in range(3)]
    assert seeds == [replica_seed(7, rank) for rank in range(3)]


class Output(RequestOutput):
    """One that can be referred to weakly."""


def test_a_rollout_keeps_its_newest_output_alone():
    """Outputs are cumulative: all of them would take memory with the square of its length."""
    made, alive = [], []

    async def outputs(*given, **more):
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


def test_requests_have_what_the_rollout_says_of_all():
    given = {}

    async def outputs(asked, params, request_id, **more):
        given[request_id] = params
        completion = CompletionOutput(0, "", (5,), "length")
        yield RequestOutput("r", None, (1,), (completion,), True, RequestMetrics(0.0))

    async def ask(seeded_by_id):
        defaults = request_defaults(SimpleNamespace(**ROLLOUT))
        server = RolloutServer(
            EngineConfig(model="m"), "127.0.0.1", defaults=defaults, seeded_by_id=seeded_by_id
        )
        resolved = SimpleNamespace(max_model_len=1000)
        server._engine = SimpleNamespace(resolved=resolved, generate=outputs)
        await server.answer([1], {}, "det-0")
        await server.answer([1], {"repetition_penalty": 1.0, "seed": 3}, "det-1")
        await server.answer([1], {}, "det-2")

    asyncio.run(ask(seeded_by_id=False))
    assert (given["det-0"].repetition_penalty, given["det-0"].ignore_eos) == (1.5, True)
    assert (given["det-1"].repetition_penalty, given["det-1"].ignore_eos) == (1.0, True)
    assert given["det-0"].seed is None
    asyncio.run(ask(seeded_by_id=True))
    first = [one.seed for one in given.values()]
    asyncio.run(ask(seeded_by_id=True))
    assert first == [one.seed for one in given.values()]
    assert first[1] == 3
    assert first[0] != first[2]


@pytest.mark.parametrize(
    ("asked", "limit"),
    [({}, 24), ({"max_tokens": 5}, 5), ({"max_new_tokens": 6}, 6), ({"max_tokens": 0}, 1)],
)
def test_an_answer_has_the_tokens_that_it_may_have_and_one_at_least(asked, limit):
    server = RolloutServer(EngineConfig(model="m"), "127.0.0.1", lengths=(16, 24))
    server._engine = SimpleNamespace(resolved=SimpleNamespace(max_model_len=100))
    assert server._params(dict(asked), 10).max_tokens == limit
