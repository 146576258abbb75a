"""A server whose weights change over HTTP says what an engine of those weights says."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import pytest
import torch

from helpers.budgets import resident_bytes
from helpers.chat_model import write_chat_model
from helpers.events import events
from helpers.http_server import TOY_ENGINE, TrainerClient, free_port, running_server
from helpers.updates import forms_of, tensors_of
from sametoken import LLM, SamplingParams
from sametoken.distributed.trainer_group import TrainerGroup
from sametoken.errors import RequestError, WeightUpdateError
from sametoken.serving.weight_sender import WeightSender, require_no_other_host
from sametoken.types.weight_updates import Rendezvous

PROMPTS = ["the inner", "a thin in", "in the", "er the the the"]
SAMPLING = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
#: Sizes that make one leaked copy of the weights visible: 5 MB.
LARGER = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two checkpoints of one form."""
    folder = tmp_path_factory.mktemp("models")
    return [write_chat_model(folder / str(seed), seed, **LARGER) for seed in (0, 1)]


@pytest.fixture(scope="module")
def said(models):
    """What engines that were built with them say to each prompt."""
    return [offline(path) for path in models]


def offline(path: Path) -> list[tuple[int, ...]]:
    outputs = LLM(str(path), **TOY_ENGINE).generate(PROMPTS, SamplingParams(**SAMPLING))
    return [one.outputs[0].token_ids for one in outputs]


class Client(TrainerClient):
    def answer(self, prompt: str, sampling: dict = SAMPLING) -> tuple[tuple[int, ...], list[int]]:
        return super().answer(prompt, sampling)

    def says(self, expected: list[tuple[int, ...]], version: int) -> None:
        assert [self.answer(one) for one in PROMPTS] == [
            (ids, [version, version]) for ids in expected
        ]
        assert self.get("/weight_info") == {"weight_version": str(version)}

    def update(self, path: Path, version: str | None = None) -> None:
        self.post("/start_weight_update")
        self.post("/update_weights", {"update_info": {"path": path.name}})
        self.post("/finish_weight_update", {"weight_version": version} if version else None)


@contextmanager
def asked(client: Client) -> Iterator[Future]:
    """The answer to a prompt that a pause holds up; however the block ends, the engine runs on."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(client.answer, PROMPTS[0])
        finally:
            client.post("/wake_up")


@pytest.fixture(scope="module")
def by_files(models):
    config = json.dumps({"backend": "files", "directory": str(models[0].parent)})
    engine = {"speculative_config": NGRAM}
    with running_server(models[0], engine=engine, weight_transfer_config=config) as server:
        yield Client(server.url), server


@pytest.fixture(scope="module")
def by_group(models):
    config = json.dumps({"backend": "gloo", "timeout": 5.0})
    with running_server(models[0], weight_transfer_config=config) as server:
        yield Client(server.url)


def test_an_update_by_files(by_files, models, said):
    client, _ = by_files
    assert client.post("/init_weight_transfer_engine", {"init_info": {}})
    assert client.get("/get_world_size") == {"world_size": 1}
    client.update(models[0], "3")
    client.says(said[0], 3)
    client.update(models[1], "7")
    client.says(said[1], 7)
    assert client.post("/update_weight_version", {"new_version": "9"})["new_version"] == "9"
    client.says(said[1], 9)
    client.update(models[0])
    client.says(said[0], 10)


def test_streams_and_chats_have_versions(by_files):
    client, _ = by_files
    now = client.version
    chat = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 4}
    whole = client.post("/v1/chat/completions", chat)
    assert whole["choices"][0]["weight_versions"] == [now, now]
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "in", "max_tokens": 4}),
    ):
        parts = events(httpx.post(client.url + path, json=body | {"stream": True}))
        found = [c.get("weight_versions") for part in parts for c in part["choices"]]
        assert [now, now] in found
        assert all(one in (None, [now, now]) for one in found)


def test_a_half_sent_update_changes_nothing(by_files, models):
    client, _ = by_files
    now, before = client.version, [client.answer(one)[0] for one in PROMPTS]
    directory = models[0].parent
    assert "start_weight_update" in client.refused("/finish_weight_update")
    client.post("/start_weight_update")
    assert "model." in client.refused("/finish_weight_update")
    for name in ("", ".", "..", "/etc", "no such", "0/model.safetensors", "x\0", "a" * 5000):
        client.post("/start_weight_update")
        told = client.refused("/update_weights", {"update_info": {"path": name}})
        assert "names no directory" in told
    (directory / "empty").mkdir()
    client.post("/update_weights", {"update_info": {"path": "empty"}})
    assert client.refused("/update_weights", {"update_info": {"path": "1"}})
    assert client.refused("/finish_weight_update")
    client.post("/start_weight_update")
    client.post("/update_weights", {"update_info": {"path": "1"}})
    assert "does not follow" in client.refused("/finish_weight_update", {"weight_version": "0"})
    # An update in the middle, taken over by the next one.
    client.post("/start_weight_update")
    client.post("/update_weights", {"update_info": {"path": "1"}})
    client.says(before, now)
    client.post("/start_weight_update")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/init_weight_transfer_engine", None),
        ("/init_weight_transfer_engine", {}),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "x"}}),
        ("/start_weight_update", {"is_checkpoint_format": False}),
        ("/start_draft_weight_update", None),
        ("/update_weights", {"update_info": None}),
        ("/update_weights", {"update_info": {}}),
        ("/update_weights", {"update_info": {"path": 1}}),
        ("/update_weights", {"update_info": {"path": "1", "names": []}}),
        ("/update_weights", {"update_info": {"path": "1", "packed": True}}),
        ("/update_weights", {"update_info": {"path": "1"}, "more": 1}),
        ("/finish_weight_update", {"weight_version": "step-42"}),
        ("/finish_weight_update", {"weight_version": 1.5}),
        ("/finish_weight_update", {"weight_version": -1}),
        ("/finish_weight_update", {"weight_version": "9" * 30}),
        ("/update_weight_version", {}),
        ("/update_weight_version", {"new_version": "0"}),
        ("/pause?mode=sleep", None),
        ("/sleep?level=3", None),
        ("/sleep?mode=keep", None),
        ("/wake_up?tags=all", None),
    ],
)
def test_what_does_not_fit_is_one_error(by_files, path, body):
    client, _ = by_files
    before = client.version
    assert client.refused(path, body)
    assert client.version == before


def test_pauses(by_files):
    client, _ = by_files
    assert client.post("/pause") == {"status": "paused"}
    assert client.get("/is_paused") == {"is_paused": True}
    with asked(client) as waiting:
        assert client.post("/pause?mode=keep&clear_cache=false") == {"status": "paused"}
        assert not waiting.done()
        assert client.post("/resume") == {"status": "resumed"}
        assert len(waiting.result(30)[0]) == SAMPLING["max_tokens"]
    assert client.post("/pause?wait_for_inflight_requests=true") == {"status": "paused"}
    client.post("/resume")
    assert client.get("/is_paused") == {"is_paused": False}


def test_sleep_gives_memory_back_until_it_is_needed(by_files, models, said):
    client, server = by_files
    pid = server.engine._client.supervisor.process.pid
    client.update(models[0])
    client.says(said[0], client.version)
    client.post("/sleep")
    assert client.get("/is_sleeping") == {"is_sleeping": True}
    assert "Wake it up" in client.refused("/resume")
    with asked(client) as waiting:
        assert client.post("/wake_up?tags=weights")
        assert client.get("/is_sleeping") == {"is_sleeping": True}
        assert not waiting.done()
        assert client.post("/wake_up?tags=kv_cache")
        assert waiting.result(30)[0] == said[0][0]
    client.says(said[0], client.version)
    refused = asyncio.run_coroutine_threadsafe(server.engine.sleep(3), server._loop)
    with pytest.raises(RequestError, match="level"):
        refused.result(30)
    assert client.get("/is_paused") == {"is_paused": False}
    before = resident_bytes(pid)
    client.post("/sleep?level=2")
    assert before - resident_bytes(pid) > sum(one.nbytes for one in tensors_of(models[0]).values())
    client.post("/wake_up?tags=weights")
    assert "Update the weights" in client.refused("/wake_up")
    client.post("/update_weight_version", {"new_version": str(client.version + 1)})
    assert "Update the weights" in client.refused("/wake_up")
    client.update(models[1])
    client.post("/wake_up")
    assert client.get("/is_sleeping") == {"is_sleeping": False}
    assert client.get("/is_paused") == {"is_paused": False}
    client.says(said[1], client.version)


def test_updates_under_load(by_files, models, said):
    """Whatever runs: what is of one version alone is what an engine of its weights says."""
    client, _ = by_files
    client.update(models[0])
    weights = {client.version: 0}
    found: list = []
    stop = threading.Event()

    def ask(number: int) -> None:
        mine = Client(client.url)
        while not stop.is_set():
            index = number % len(PROMPTS)
            found.append((index, *mine.answer(PROMPTS[index])))
            number += 1

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        try:
            for number in range(12):
                client.update(models[(number + 1) % 2])
                weights[client.version] = (number + 1) % 2
                seen = len(found)
                # Four were on their way when the weights changed, so one at least began after it.
                while len(found) < seen + 5:
                    assert not any(one.done() for one in asking)
        finally:
            stop.set()
        for one in asking:
            one.result(30)
    pure = [(index, ids, oldest) for index, ids, (oldest, newest) in found if oldest == newest]
    assert len({version for *_, version in pure}) >= 12
    for index, ids, version in pure:
        assert ids == said[weights[version]][index]


def test_fifty_updates_leave_memory_flat(by_files, models, said):
    client, server = by_files
    pid = server.engine._client.supervisor.process.pid
    for number in range(8):
        client.update(models[number % 2])
    before = resident_bytes(pid)
    for number in range(50):
        client.update(models[number % 2])
    weights = sum(one.nbytes for one in tensors_of(models[0]).values())
    assert resident_bytes(pid) - before < 10 * weights
    client.says(said[1], client.version)


def test_a_trainers_process_group(by_group, models, said):
    sender = WeightSender([by_group.url], port=free_port())
    sender.send(tensors_of(models[1]).items(), 7)
    by_group.says(said[1], 7)
    sender.send([(k, v.double()) for k, v in tensors_of(models[0]).items()])
    by_group.says(said[0], 8)
    with pytest.raises(WeightUpdateError, match="no weights"):
        sender.send([], target="drafter")
    spoilt = tensors_of(models[1]) | {"model.norm.weight": torch.full((128,), torch.nan)}
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight"):
        sender.send(spoilt.items())
    for bad, says in (
        (torch.ones(128).to_sparse(), "to_dense"),
        (torch.ones(2, device="meta"), ""),
    ):
        with pytest.raises(WeightUpdateError, match=rf"model\.norm\.weight.*{says}"):
            sender.send((tensors_of(models[1]) | {"model.norm.weight": bad}).items())
    by_group.says(said[0], 8)
    # The group is whole: every tensor came.
    sender.send(tensors_of(models[1]).items())
    by_group.says(said[1], 9)


@pytest.mark.parametrize("at_once", [True, False], ids=["vllm-0.28", "vllm-0.22"])
def test_a_trainer_that_joins_tensors(by_group, models, said, at_once):
    """As TRL's does, which says so as it joins, or beside vLLM before 0.28 in each update."""
    tensors = tensors_of(models[0])
    place = {"master_address": "127.0.0.1", "master_port": free_port()}
    at = Rendezvous("gloo", *place.values(), 0, 2, 10.0, packed_bytes=70_000)
    info = place | {"rank_offset": 1, "world_size": 2}
    packed = {"packed": True, "packed_buffer_size_bytes": 70_000}
    info |= packed if at_once else {}
    forms = forms_of(tensors) | ({} if at_once else packed)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(by_group.post, "/init_weight_transfer_engine", {"init_info": info})
        group = TrainerGroup(at)
        joined.result(30)
        by_group.post("/start_weight_update", {})
        sent = pool.submit(by_group.post, "/update_weights", {"update_info": forms})
        flat = [one.view(-1).view(torch.uint8) for one in tensors.values()]
        pieces = list(group.pieces([one.numel() for one in flat]))
        for piece in pieces:
            group.broadcast(torch.cat([flat[i] for i in piece]))
        sent.result(30)
    assert 1 < len(pieces) < len(tensors)
    by_group.post("/finish_weight_update", {})
    assert by_group.post("/reset_prefix_cache") == {"success": True}
    by_group.says(said[0], by_group.version)


def test_what_trl_asks_and_reads(by_group):
    """The fields of TRL 1.16's client."""
    info = by_group.get("/server_info?config_format=json")["vllm_config"]
    assert info["weight_transfer_config"] is not None
    assert info["lora_config"] is None
    assert info["model_config"]["logprobs_mode"] == "raw_logprobs"
    sampling = {"n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    sampling |= {"min_p": 0.0, "max_tokens": 3, "logprobs": 0}
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True, **sampling}
    model = by_group.get("/v1/models")["data"][0]["id"]
    body = {"model": model, "prompt": [[1, 2, 3], [4, 5]], **asked}
    choices = by_group.post("/v1/completions", body)["choices"]
    assert [one["prompt_token_ids"] for one in choices] == [[1, 2, 3]] * 2 + [[4, 5]] * 2
    for one in choices:
        said = one["logprobs"]
        assert said["tokens"] == [f"token_id:{token}" for token in one["token_ids"]]
        assert [list(top) for top in said["top_logprobs"]] == [[token] for token in said["tokens"]]
        assert all(value <= 0 for value in said["token_logprobs"])


def test_a_trainer_that_dies_leaves_the_old_weights(by_group, models):
    now, before = by_group.version, [by_group.answer(one)[0] for one in PROMPTS]
    tensors = tensors_of(models[0])
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        info = {"master_address": "127.0.0.1", "master_port": port}
        joined = pool.submit(by_group.post, "/init_weight_transfer_engine", {"init_info": info})
        group = TrainerGroup(Rendezvous("gloo", "127.0.0.1", port, 0, 2, 10.0))
        joined.result(30)
        by_group.post("/start_weight_update")
        update = {"update_info": forms_of(tensors)}
        told = pool.submit(by_group.refused, "/update_weights", update)
        for tensor in list(tensors.values())[:3]:
            group.broadcast(tensor)
        del group
        assert "is not whole" in told.result(30)
    assert "start_weight_update" in by_group.refused("/finish_weight_update")
    by_group.says(before, now)
    WeightSender([by_group.url], port=free_port()).send(tensors.items(), now + 1)
    assert by_group.version == now + 1


def test_no_group_waits_for_a_server_that_would_not_join(by_files, monkeypatch):
    client, _ = by_files
    monkeypatch.setattr("sametoken.serving.weight_sender.TrainerGroup", None)
    with pytest.raises(WeightUpdateError, match=r"by 'files', and this trainer .* by 'gloo'"):
        WeightSender([client.url])
    with pytest.raises(WeightUpdateError, match="does not answer"):
        WeightSender([f"http://127.0.0.1:{free_port()}"])
    with pytest.raises(WeightUpdateError, match="404"):
        WeightSender([f"{client.url}/v1"])
    monkeypatch.setattr("sametoken.serving.weight_sender._QUICKLY_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(WeightUpdateError, match=r"does not answer \(timed out\)"),
    ):
        WeightSender([f"http://127.0.0.1:{silent.getsockname()[1]}"])


def test_no_server_waits_for_a_trainer_that_cannot_come(by_group, monkeypatch):
    monkeypatch.setattr("sametoken.serving.weight_sender.TrainerGroup", None)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(WeightUpdateError, match=f"port {port} of this host cannot be taken"):
            WeightSender([by_group.url], port=port)
    for port in (0, 99999):
        with pytest.raises(WeightUpdateError, match=f"port {port} of this host"):
            WeightSender([by_group.url], port=port)
    for urls in ([], by_group.url, [by_group.url, f"{by_group.url}/"]):
        with pytest.raises(WeightUpdateError, match="no list of servers"):
            WeightSender(urls)
    with pytest.raises(WeightUpdateError, match="does not answer"):
        WeightSender(["somewhere"])


@pytest.mark.parametrize("address", ["no-such-host.invalid", "", "198.51.100.1", "a" * 70])
def test_no_server_waits_at_an_address_that_is_not_the_trainer_s(by_group, monkeypatch, address):
    monkeypatch.setattr("sametoken.serving.weight_sender.TrainerGroup", None)
    monkeypatch.setattr("sametoken.serving.weight_sender._QUICKLY_S", 1.0)
    with pytest.raises(WeightUpdateError, match=f"address='{address}' does not lead to this"):
        WeightSender([by_group.url], address=address, port=free_port())


class Connection:
    """A connection from one address to another."""

    def __init__(self, own: str, theirs: str) -> None:
        self.getsockname, self.getpeername = lambda: (own, 1), lambda: (theirs, 2)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None: ...

    close = __exit__


@pytest.mark.parametrize(
    ("address", "own", "theirs", "is_refused"),
    [
        ("127.0.0.1", "10.0.0.1", "10.0.0.2", True),
        ("localhost", "fd00::1", "fd00::2", True),
        ("0.0.0.0", "10.0.0.1", "10.0.0.2", True),
        ("127.0.0.1", "127.0.0.1", "127.0.1.1", False),
        ("127.0.0.1", "10.0.0.1", "10.0.0.1", False),
        ("10.0.0.1", "10.0.0.1", "10.0.0.2", False),
        ("trainer", "10.0.0.1", "10.0.0.2", False),
    ],
)
def test_a_server_of_another_host_is_not_sent_to_its_own(
    monkeypatch, address, own, theirs, is_refused
):
    monkeypatch.setattr(socket, "create_connection", lambda *given: Connection(own, theirs))
    asked = nullcontext()
    if is_refused:
        asked = pytest.raises(WeightUpdateError, match="http://engine:8000 is on another")
    with asked:
        require_no_other_host(["http://engine:8000"], address)


def test_a_sender_checks_that(by_group, monkeypatch):
    monkeypatch.setattr("sametoken.serving.weight_sender.TrainerGroup", None)
    monkeypatch.setattr("sametoken.serving.weight_sender._is_elsewhere", lambda url: True)
    with pytest.raises(WeightUpdateError, match=r"address='127\.0\.0\.1' means the host that asks"):
        WeightSender([by_group.url], port=free_port())


def forms(count: int, **changes) -> dict:
    good = {
        "names": [f"t{i}" for i in range(count)],
        "dtype_names": ["float32"] * count,
        "shapes": [[2, 2]] * count,
    }
    return {"update_info": good | changes}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (forms(2, shapes=[[2, 2]]), "one of each"),
        (forms(1, names=None), "names, dtype_names and shapes"),
        (forms(0), "names, dtype_names and shapes"),
        (forms(1, path="1"), "names, dtype_names and shapes"),
        (forms(1, shapes=[[-1]]), "shapes"),
        (forms(1, shapes=[[1] * 9]), "shapes"),
        (forms(1, shapes=[[2**30, 2**30]]), "may have"),
        (forms(1, dtype_names=["object"]), "dtype"),
        (forms(2, names=["t", "t"]), "sent twice"),
        (forms(1), "init_weight_transfer_engine"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_they_come(by_group, body, told):
    by_group.post("/start_weight_update")
    if told in ("may have", "dtype", "sent twice"):
        WeightSender([by_group.url], port=free_port())
    assert told in by_group.refused("/update_weights", body)
