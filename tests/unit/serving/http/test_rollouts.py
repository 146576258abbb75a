"""Who may control the engine, and what is refused before it reaches the engine."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace

import pytest

from helpers.fake_engine import FakeEngine
from sametoken.errors import CheckpointError, DrainingError, UnsupportedError, WeightUpdateError
from sametoken.serving.http.rollouts import rollout_routes
from sametoken.serving.http.transfer_config import WeightTransferConfig
from sametoken.serving.messages import JoinedTensors, TensorForm
from sametoken.types.weight_updates import Rendezvous

GLOO = json.dumps({"backend": "gloo", "timeout": 5})


class Engine(FakeEngine):
    """Notes what it is told."""

    is_paused, is_sleeping, weight_version = False, True, 7

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.told: list = []
        self.error = error

    def __getattr__(self, name: str):
        async def note(*given):
            self.told.append((name, *given))
            if self.error is not None:
                raise self.error
            return 9

        return note


SERVED = SimpleNamespace(engine=Engine(), config=SimpleNamespace(api_key=("secret",)))
PATHS = {
    route.path: next(iter(route.methods))
    for route in rollout_routes(SERVED, WeightTransferConfig("gloo")).routes
}


@pytest.mark.parametrize("path", PATHS)
def test_without_the_option_there_is_no_control(serve, path):
    assert serve(Engine()).request(PATHS[path], path).status_code == 404


@pytest.mark.parametrize("path", PATHS)
def test_a_key_is_needed_where_there_is_one(serve, path):
    client = serve(Engine(), weight_transfer_config=GLOO, api_key=("secret",))
    assert client.request(PATHS[path], path).status_code == 401
    key = {"Authorization": "Bearer secret", "Origin": "https://elsewhere"}
    assert client.request(PATHS[path], path, headers=key).status_code in (200, 400)


@pytest.mark.parametrize("path", PATHS)
def test_pages_of_other_sites_are_refused(serve, path):
    client = serve(engine := Engine(), weight_transfer_config=GLOO)
    answer = client.request(PATHS[path], path, headers={"Origin": "https://elsewhere"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert engine.told == []


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/pause", None, ("pause", "abort")),
        ("/pause?mode=keep", None, ("pause", "keep")),
        ("/pause?wait_for_inflight_requests=true", None, ("pause", "wait")),
        ("/resume", {}, ("resume",)),
        ("/sleep", None, ("sleep", 1, "abort")),
        ("/sleep?level=2&mode=wait", None, ("sleep", 2, "wait")),
        ("/wake_up", None, ("wake_up", None)),
        ("/wake_up?tags=weights", None, ("wake_up", ["weights"])),
        ("/wake_up?tags=weights&tags=kv_cache", None, ("wake_up", ["weights", "kv_cache"])),
        ("/start_weight_update", {}, ("start_update", "model")),
        ("/start_weight_update", {"is_checkpoint_format": True}, ("start_update", "model")),
        ("/reset_prefix_cache", None, ("reset_prefix_cache",)),
        ("/start_draft_weight_update", None, ("start_update", "drafter")),
        ("/finish_weight_update", None, ("finish_update", None)),
        ("/finish_weight_update", {}, ("finish_update", None)),
        ("/finish_weight_update", {"weight_version": "12"}, ("finish_update", 12)),
        ("/finish_weight_update", {"weight_version": 12}, ("finish_update", 12)),
        ("/update_weight_version", {"new_version": "9"}, ("name_weights", 9)),
    ],
)
def test_what_the_engine_is_told(serve, path, body, told):
    client = serve(engine := Engine(), weight_transfer_config=GLOO)
    assert client.post(path, json=body).status_code == 200
    assert engine.told == [told]


@pytest.mark.parametrize("value", [False, 0, 1, 1.0, "true", None])
def test_weights_in_another_format_are_refused(serve, value):
    client = serve(engine := Engine(), weight_transfer_config=GLOO)
    answer = client.post("/start_weight_update", json={"is_checkpoint_format": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "is_checkpoint_format")
    assert engine.told == []


def test_tensors_are_told_in_order(serve):
    client = serve(engine := Engine(), weight_transfer_config=GLOO)
    info = {"names": ["a", "b"], "dtype_names": ["int8", "float32"], "shapes": [[], [2, 3]]}
    assert client.post("/update_weights", json={"update_info": info}).status_code == 200
    forms = (TensorForm("a", "int8", ()), TensorForm("b", "float32", (2, 3)))
    assert engine.told.pop() == ("take_weights", forms)
    # What TRL 1.16 sends beside vLLM 0.22 to 0.27, whose trainers may name a size too.
    for size, most in (({}, 2**30), ({"packed_buffer_size_bytes": 7}, 7)):
        body = {"update_info": info | {"packed": True} | size}
        assert client.post("/update_weights", json=body).status_code == 200
        assert engine.told.pop() == ("take_weights", JoinedTensors(forms, most))


PLACE = {"master_address": "x", "master_port": 1}
NCCL_ID = base64.b64encode(bytes(128)).decode()


@pytest.mark.parametrize(
    ("backend", "info"),
    [
        ("gloo", {}),
        ("gloo", {"master_address": "x"}),
        ("gloo", {"master_port": 1}),
        ("gloo", PLACE | {"master_port": 0}),
        ("gloo", PLACE | {"master_port": 2**16}),
        ("gloo", PLACE | {"rank_offset": 0}),
        ("gloo", PLACE | {"rank_offset": 2}),
        ("gloo", PLACE | {"world_size": 1}),
        ("gloo", PLACE | {"more": 1}),
        ("gloo", {"nccl_unique_id_b64": NCCL_ID}),
        ("nccl", PLACE | {"nccl_unique_id_b64": NCCL_ID}),
        ("nccl", {"nccl_unique_id_b64": NCCL_ID[4:]}),
        ("nccl", {"nccl_unique_id_b64": "-"}),
    ],
)
def test_where_nobody_can_meet(serve, backend, info):
    client = serve(engine := Engine(), weight_transfer_config=json.dumps({"backend": backend}))
    answer = client.post("/init_weight_transfer_engine", json={"init_info": info})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "init_info")
    assert engine.told == []


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("gloo", [(PLACE, Rendezvous("gloo", "x", 1, 1, 2, 300.0))]),
        (
            "nccl",
            [
                # What TRL 1.16 sends.
                (
                    PLACE | {"rank_offset": 1, "world_size": 2, "packed": True},
                    Rendezvous("nccl", "x", 1, 1, 2, 300.0, packed_bytes=2**30),
                ),
                (
                    PLACE | {"packed": True, "packed_buffer_size_bytes": 7},
                    Rendezvous("nccl", "x", 1, 1, 2, 300.0, packed_bytes=7),
                ),
                (
                    {"nccl_unique_id_b64": NCCL_ID, "rank_offset": 2, "world_size": 3},
                    Rendezvous("nccl", "", 0, 2, 3, 300.0, unique_id=bytes(128)),
                ),
            ],
        ),
    ],
)
def test_where_the_group_meets(serve, backend, expected):
    client = serve(engine := Engine(), weight_transfer_config=json.dumps({"backend": backend}))
    for info, joined in expected:
        body = {"init_info": info}
        assert client.post("/init_weight_transfer_engine", json=body).status_code == 200
        assert engine.told.pop() == ("join_trainer", joined)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (WeightUpdateError("a tensor is missing", "send it"), 400, "weights_refused"),
        (CheckpointError("the file is cut off", "write it again"), 400, "weights_refused"),
        (UnsupportedError("weights do not change"), 400, "unsupported"),
        (DrainingError("no"), 503, "draining"),
    ],
)
def test_refusals_of_the_engine(serve, error, status, code):
    client = serve(Engine(error), weight_transfer_config=GLOO)
    answer = client.post("/finish_weight_update")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_what_is_known(serve):
    client = serve(Engine(), weight_transfer_config=GLOO)
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.get("/weight_info").json() == {"weight_version": "7"}
    assert client.get("/server_info", params={"config_format": "json"}).json() == {
        "vllm_config": {
            "model_config": {
                "model": "toy",
                "dtype": "torch.float32",
                "max_model_len": 512,
                "logprobs_mode": "raw_logprobs",
            },
            "parallel_config": {"tensor_parallel_size": 1, "data_parallel_size": 1},
            "lora_config": {"max_loras": 3, "max_lora_rank": 16},
            "weight_transfer_config": {"backend": "gloo"},
        }
    }
    assert client.get("/server_info", params={"config_format": "text"}).status_code == 400
    assert client.get("/get_world_size?include_dp=false").json() == {"world_size": 1}


def test_links_lead_nowhere_else(serve, tmp_path):
    (tmp_path / "served" / "step").mkdir(parents=True)
    (tmp_path / "served" / "out").symlink_to(tmp_path)
    config = json.dumps({"backend": "files", "directory": str(tmp_path / "served")})
    client = serve(engine := Engine(), weight_transfer_config=config)
    answers = {
        name: client.post("/update_weights", json={"update_info": {"path": name}}).status_code
        for name in ("step", "step/../step", "out", "out/served", "../served/step", "../served")
    }
    assert answers == {
        "step": 200,
        "step/../step": 200,
        "out": 400,
        "out/served": 400,
        "../served/step": 200,
        "../served": 400,
    }
    assert {path for _, path in engine.told} == {tmp_path / "served" / "step"}


def test_the_document_has_them(serve):
    document = serve(Engine(), weight_transfer_config=GLOO).get("/openapi.json").json()
    for path, method in PATHS.items():
        operation = document["paths"][path][method.lower()]
        assert operation["description"]
        assert "422" not in operation["responses"]


def test_an_adapter_s_files_have_a_request_of_their_own(serve, tmp_path):
    files = json.dumps({"backend": "files", "directory": str(tmp_path)})
    body = {"lora_name": "sql", "lora_config": {}}
    answer = serve(Engine(), weight_transfer_config=files).post("/start_lora_update", json=body)
    assert answer.status_code == 400
    assert "/v1/load_lora_adapter" in answer.json()["error"]["message"]
