"""Weights from a trainer to an engine on another GPU, by NCCL, or on the same, by CUDA IPC."""

from __future__ import annotations

import base64
import json
import os
import pickle
import queue
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from gpu_files import OPTIONS, write_target
from safetensors.torch import load_file

from helpers.http_server import TrainerClient, running_server
from helpers.updates import forms_of
from sametoken import LLM, SamplingParams
from sametoken.distributed.shared_memory import share
from sametoken.engine.live_adapters import NoLiveAdapters
from sametoken.engine.weights import NewWeights
from sametoken.errors import SametokenError
from sametoken.serving.messages import (
    FinishUpdate,
    Order,
    SharedTensors,
    StartUpdate,
    TakeWeights,
    TensorForm,
)
from sametoken.serving.weight_sender import WeightSender
from sametoken.serving.weight_updates import WeightUpdates
from sametoken.types.weight_updates import MemoryHandle

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PROMPTS = [[i + 1, i + 2, i + 3] * 5 for i in range(8)]
SAMPLING = {"max_tokens": 48, "temperature": 0.8, "seed": 3, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
ENGINE = OPTIONS | {"skip_tokenizer_init": True, "max_num_seqs": 8}
#: In place of the toy's.
SERVED = {"num_kv_blocks": None, "block_size": 0, "speculative_config": NGRAM}


def offline(path) -> list[tuple[int, ...]]:
    params = SamplingParams(**SAMPLING, detokenize=False)
    prompts = [{"prompt_token_ids": one} for one in PROMPTS]
    outputs = LLM(str(path), **ENGINE).generate(prompts, params)
    return [one.outputs[0].token_ids for one in outputs]


class Trainer(TrainerClient):
    def answers(self) -> list[tuple[int, ...]]:
        return [self.answer(one, SAMPLING)[0] for one in PROMPTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [write_target(folder / str(i), "LlamaForCausalLM", i) for i in range(2)]


@pytest.fixture(scope="module")
def said(models):
    return [offline(path) for path in models]


@contextmanager
def served(path, backend: str):
    config = json.dumps({"backend": backend, "timeout": 60.0})
    with running_server(path, engine=ENGINE | SERVED, weight_transfer_config=config) as server:
        yield Trainer(server.url)


def tensors_of(path, device: str) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors", device=device)


@two_gpus
def test_a_server_takes_a_trainer_s_weights(models, said):
    with served(models[0], "nccl") as trainer, torch.cuda.device(1):
        sender = WeightSender([trainer.url], backend="nccl", timeout_s=60)
        assert trainer.answers() == said[0]
        for version, which in ((5, 1), (6, 0), (7, 1)):
            sender.send(tensors_of(models[which], "cuda:1").items(), version)
            assert trainer.answers() == said[which]
            assert trainer.version == version


@pytest.fixture(scope="module")
def colocated(models):
    with served(models[0], "ipc") as trainer:
        yield trainer


@pytest.mark.alone
def test_a_server_reads_a_trainer_s_memory(colocated, models, said):
    sender = WeightSender([colocated.url], backend="ipc")
    assert colocated.answers() == said[0]
    tensors = [tensors_of(path, "cuda") for path in models]
    for version in range(5, 25):
        which = version % 2
        sender.send(tensors[which].items(), version)
        assert colocated.version == version
    assert colocated.answers() == said[0]
    sender.send(((k, v.t().contiguous().t()) for k, v in tensors[1].items()), 25)
    assert colocated.answers() == said[1]
    free = torch.cuda.mem_get_info()[0]
    del tensors
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    # The engine keeps nothing of the trainer's open: its memory goes back.
    assert torch.cuda.mem_get_info()[0] > free


def test_a_buffer_on_the_gpu_that_is_filled_again(colocated, models, said):
    """What vLLM's trainers do with ``packed``, in this engine's own words."""
    tensors = tensors_of(models[0], "cuda")
    names = [*tensors]
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    flat = {name: one.reshape(-1).view(torch.uint8) for name, one in tensors.items()}
    sizes = [[len(flat[name]) for name in part] for part in parts]
    buffer = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8, device="cuda")
    _kept, [handle] = share([buffer])
    encoded = base64.b64encode(pickle.dumps(handle)).decode()
    colocated.post("/start_weight_update")
    for part, own in zip(parts, sizes, strict=True):
        buffer[: sum(own)] = torch.cat([flat[name] for name in part])
        torch.cuda.synchronize()
        info = forms_of({name: tensors[name] for name in part})
        info |= {"tensor_sizes": own, "ipc_handles_pickled": encoded}
        colocated.post("/update_weights", {"update_info": info})
    buffer.zero_()
    torch.cuda.synchronize()
    colocated.post("/finish_weight_update", {})
    assert colocated.answers() == said[0]


def test_a_buffer_is_read_before_its_request_is_answered(monkeypatch):
    """The copy waits behind steps in flight; the trainer fills the buffer once it has an answer."""
    buffer = torch.ones(24, dtype=torch.uint8, device="cuda")
    monkeypatch.setattr("sametoken.serving.weight_updates.open_shared", lambda *_: buffer)
    loaded, answered = [], queue.SimpleQueue()

    class Weights:
        def require_target(self, target):
            return 24

        def load(self, source, target):
            loaded.extend(source.chunks("one"))
            return NewWeights.same()

    updates = WeightUpdates(Weights(), NoLiveAdapters(), buffer.device, answered.put)
    handle = {"gpu": MemoryHandle("uint8", (24,), (1,), 0, b"", 24, 0, b"", 0, b"", False)}
    shared = SharedTensors((TensorForm("one", "float32", (6,)),), (handle,), (24,))
    for command in (StartUpdate("model"), TakeWeights(shared), FinishUpdate(None)):
        torch.cuda._sleep(1_000_000_000)
        updates.begin(Order(0, command))
        done = answered.get(timeout=60)
        assert not isinstance(done.result, SametokenError), done.result
        updates.used()
        if isinstance(command, TakeWeights):
            with torch.cuda.stream(torch.cuda.Stream()):
                buffer.zero_()
    (one,) = loaded
    assert one.view(torch.uint8).tolist() == [1] * 24


def test_a_trainer_that_is_gone_or_elsewhere(colocated, said):
    before = colocated.answers(), colocated.version
    name = "model.norm.weight"
    code = (
        "import base64, pickle, torch; from sametoken.distributed.shared_memory import share\n"
        "kept, handles = share([torch.zeros(8, device='cuda')])\n"
        "print(base64.b64encode(pickle.dumps(handles)).decode(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as process:
        encoded = process.stdout.readline()[:-1]
        process.kill()
    info = {"names": [name], "dtype_names": ["float32"], "shapes": [[8]]}
    [handle] = pickle.loads(base64.b64decode(encoded))
    moved = {"another-GPU": next(iter(handle.values()))}
    elsewhere = base64.b64encode(pickle.dumps([moved])).decode()
    for sent, told in ((encoded, "cannot be opened"), (elsewhere, "another-GPU")):
        colocated.post("/start_weight_update")
        body = {"update_info": info | {"ipc_handles_pickled": sent}}
        assert told in colocated.refused("/update_weights", body)
        colocated.refused("/finish_weight_update", {})
    assert (colocated.answers(), colocated.version) == before
