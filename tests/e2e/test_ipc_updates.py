"""A trainer's tensors in shared memory, read by a server's engine in another process."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.chat_model import write_chat_model
from helpers.http_server import TOY_ENGINE, TrainerClient, running_server
from helpers.updates import forms_of, tensors_of
from sametoken import LLM, SamplingParams
from sametoken.distributed.shared_memory import device_name, share
from sametoken.errors import WeightUpdateError
from sametoken.serving.weight_sender import WeightSender

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [9, 8, 7]]
SAMPLING = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
HOST = device_name(torch.device("cpu"))
NORM = "model.norm.weight"
#: A trainer that shares one tensor, says where, and waits.
TRAINER = """
import base64, pickle, sys, torch
from sametoken.distributed.shared_memory import share
kept, handles = share([torch.zeros(3, 5)])
print(base64.b64encode(pickle.dumps(handles, 4)).decode(), flush=True)
sys.stdin.read()
"""


def encoded(handles) -> str:
    return base64.b64encode(pickle.dumps(handles, 4)).decode()


class Trainer(TrainerClient):
    def told(self, info: dict) -> str:
        """Why an update of tensors that are there is refused."""
        self.post("/start_weight_update")
        told = self.refused("/update_weights", {"update_info": info})
        self.refused("/finish_weight_update")
        return told

    def says(self) -> list[tuple[int, ...]]:
        return [self.answer(one, SAMPLING)[0] for one in PROMPTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two checkpoints of one form."""
    folder = tmp_path_factory.mktemp("models")
    return [write_chat_model(folder / str(seed), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def trainer(models):
    config = json.dumps({"backend": "ipc"})
    spec = {"speculative_config": NGRAM}
    with running_server(models[0], engine=spec, weight_transfer_config=config) as server:
        trainer = Trainer(server.url)
        yield trainer
        trainer.close()


@pytest.fixture(scope="module")
def truths(models):
    """What engines that were built with them say."""
    params = SamplingParams(**SAMPLING)
    prompts = [{"prompt_token_ids": one} for one in PROMPTS]
    outputs = [LLM(str(path), **TOY_ENGINE).generate(prompts, params) for path in models]
    return [[one.outputs[0].token_ids for one in each] for each in outputs]


def test_an_engine_reads_a_trainers_memory(trainer, models, truths):
    assert trainer.says() == truths[0]
    sender = WeightSender([trainer.url], backend="ipc")
    sender.send(tensors_of(models[1]).items(), 7)
    assert (trainer.says(), trainer.version) == (truths[1], 7)
    # Of any strides and dtype.
    sender.send((k, v.double().t().contiguous().t()) for k, v in tensors_of(models[0]).items())
    assert (trainer.says(), trainer.version) == (truths[0], 8)
    spoilt = tensors_of(models[1])
    spoilt[NORM][0] = torch.nan
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight"):
        sender.send(spoilt.items())
    with pytest.raises(WeightUpdateError, match="no weights"):
        sender.send([], target="drafter")
    assert (trainer.says(), trainer.version) == (truths[0], 8)
    held = [
        os.readlink(one) for one in map(str, Path("/proc/self/fd").iterdir()) if os.path.islink(one)
    ]
    assert not any("sametoken-weights" in one for one in held)


def test_a_buffer_that_is_filled_again(trainer, models, truths):
    """As vLLM's trainers do with ``packed``: its handle is the same, its bytes are new."""
    tensors = tensors_of(models[1])
    names = [*tensors][::-1]
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    flat = {name: one.reshape(-1).view(torch.uint8) for name, one in tensors.items()}
    sizes = [[len(flat[name]) for name in part] for part in parts]
    (_, memory), [handle] = share([torch.zeros(max(map(sum, sizes)), dtype=torch.uint8)])
    buffer = memory.bytes
    trainer.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})
    trainer.post("/start_weight_update")
    for part, own in zip(parts, sizes, strict=True):
        buffer[: sum(own)] = torch.cat([flat[name] for name in part])
        info = forms_of({name: tensors[name] for name in part}) | {"tensor_sizes": own}
        info |= {"ipc_handles_pickled": encoded(handle), "packed": True}
        trainer.post("/update_weights", {"update_info": info})
    buffer.zero_()
    trainer.post("/finish_weight_update")
    assert trainer.says() == truths[1]
    info["tensor_sizes"][0] -= 4
    assert "one after another" in trainer.told(info)
    info["tensor_sizes"] = None
    assert "tensor_sizes" in trainer.told(info)


def test_what_is_not_there_is_refused(trainer):
    before = trainer.says(), trainer.version
    _kept, [handle] = share([torch.zeros(3, 5)])
    place = handle[HOST]
    good = forms_of({NORM: torch.zeros(3, 5)})

    def told(handles, **changes) -> str:
        return trainer.told(good | {"ipc_handles_pickled": encoded(handles)} | changes)

    assert HOST in told([{"GPU-of-another-host": place}])
    assert "other-host" in told([{"other-host": place}])
    assert "[3, 5]" in told([{HOST: place}], shapes=[[5, 3]])
    assert "float32 of shape" in told([{HOST: place}], dtype_names=["int32"])
    assert "cannot be opened" in told([{HOST: (*place[:3], 2, *place[4:])}])
    assert "handles of 2 tensors" in told([{HOST: place}] * 2)
    assert "ipc_handles_pickled" in trainer.told(good)
    init_info = {"master_port": 1}
    assert "no fields" in trainer.refused("/init_weight_transfer_engine", {"init_info": init_info})
    assert (trainer.says(), trainer.version) == before


def test_a_trainer_that_has_died(trainer):
    before = trainer.says(), trainer.version
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as process:
        handles = process.stdout.readline()[:-1]
        info = forms_of({NORM: torch.zeros(3, 5)}) | {"ipc_handles_pickled": handles}
        trainer.post("/start_weight_update")
        trainer.post("/update_weights", {"update_info": info})
        # All of it is checked as any update is, and here the rest is missing.
        assert "lacks the tensor" in trainer.refused("/finish_weight_update")
        process.kill()
    assert "Keep the trainer" in trainer.told(info)
    assert (trainer.says(), trainer.version) == before
