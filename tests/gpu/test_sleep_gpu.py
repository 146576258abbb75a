"""A sleep on a GPU: memory goes back to the driver, and what is said afterwards stays the same."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import httpx
import pytest
import torch
from gpu_files import OPTIONS, SIZES
from recorded_gpu import windows_must_be_captured

from helpers.checkpoints import head_tensors, write_llama, write_safeailab
from helpers.http_server import running_server
from helpers.updates import said, same_weights, tensors_of
from sametoken import LLM
from sametoken.engine.sleep import DeviceMemory
from sametoken.errors import EngineDeadError, RequestError

pytestmark = pytest.mark.alone

#: Weights of 150 MB, so that most of their memory is in segments of their own.
LARGE = SIZES | {"hidden_size": 512, "intermediate_size": 8192}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
ENGINE = OPTIONS | {"skip_tokenizer_init": True, "max_num_seqs": 8}
MIB = 2**20


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    return [write_llama(folder / str(seed), seed, **LARGE) for seed in (0, 1)]


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    one_layer = LARGE | {"num_hidden_layers": 1}
    path = tmp_path_factory.mktemp("head")
    head = write_safeailab(path, head_tensors(**LARGE), **one_layer)
    eagle3 = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(head)}
    return {"plain": None, "ngram": NGRAM, "eagle3": eagle3}


def engine(path: Path, spec: dict | None = None, **options) -> LLM:
    return LLM(str(path), speculative_config=spec, **ENGINE | options)


@pytest.fixture(scope="module")
def answers(targets):
    """What engines that were built with them say."""
    found = [said(engine(path)) for path in targets]
    assert found[0] != found[1]
    return found


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def sizes(llm: LLM) -> tuple[int, int]:
    """Bytes of KV and of the target's weights that a sleep gives back."""
    memory = llm._engine.sleep.memory
    assert isinstance(memory, DeviceMemory)
    kv, weights = (sum(size for _, size in part) for part in (memory.kv, memory.weights))
    return kv, weights


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["plain", "ngram", "eagle3"])
def test_tokens_stay_and_memory_goes(name, eager, targets, answers, specs, monkeypatch):
    live = engine(targets[0], specs[name], enforce_eager=eager)
    if not eager:
        windows_must_be_captured(monkeypatch)
    kv, weights = sizes(live)
    assert weights >= 0.95 * live._engine.resolved.weights_bytes
    assert said(live) == answers[0]
    awake = free_bytes()
    # Twice: what comes back once must be found again, at other addresses.
    for _ in range(2):
        live.sleep()
        asleep = free_bytes()
        assert asleep - awake >= 0.95 * kv
        live.wake_up(["weights"])
        assert free_bytes() >= asleep - 16 * MIB, "weights of level 1 are there"
        live.wake_up(["kv_cache"])
        assert said(live) == answers[0]
        assert abs(free_bytes() - awake) < 128 * MIB, "no graph or storage is there twice"
    for at, tags in ((1, ["weights"]), (0, [])):
        allocated = torch.cuda.memory_allocated()
        live.sleep(2)
        assert free_bytes() - awake >= 0.95 * kv + 0.7 * weights - 128 * MIB * (at == 0)
        assert allocated - torch.cuda.memory_allocated() >= kv + weights
        with pytest.raises(RequestError, match="Update the weights"):
            live.wake_up()
        live.wake_up(tags)
        live.update_weights(tensors_of(targets[at]).items())
        live.wake_up()
        assert said(live) == answers[at]
        assert same_weights(live, engine(targets[at], specs[name], enforce_eager=True))
    live._engine.scheduler.check_integrity()


def test_no_step_replays_graphs_of_before(targets, monkeypatch):
    """They would read memory that is gone: without new ones a step must fail."""
    live = engine(targets[0], NGRAM)
    graphs = live._engine._runner.launcher
    assert graphs._captured
    live.sleep()
    assert not graphs._captured
    with monkeypatch.context() as patch:
        patch.setattr(type(graphs), "capture_all", lambda self: None)
        live.wake_up()
    with pytest.raises(EngineDeadError, match="KeyError"):
        said(live)


def test_a_device_without_room_is_named_and_may_be_asked_again(targets, answers):
    live = engine(targets[0], NGRAM)
    kv, _ = sizes(live)
    live.sleep()
    taken = torch.empty(free_bytes() - kv // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(RequestError, match="no room to wake up"):
        live.wake_up()
    assert live.is_sleeping
    del taken
    free_bytes()
    live.wake_up()
    assert said(live) == answers[0]


def test_a_server_sleeps_and_wakes_up(targets):
    kv, _ = sizes(engine(targets[0], NGRAM))
    prompt = {"prompt": [5, 6, 7] * 9, "max_tokens": 32, "return_token_ids": True, "seed": 3}
    # In place of the toy's.
    served = {"num_kv_blocks": None, "block_size": 0, "speculative_config": NGRAM}
    transfer = json.dumps({"backend": "files", "directory": str(targets[0].parent)})
    with running_server(
        targets[0], engine=ENGINE | served, weight_transfer_config=transfer
    ) as server:
        client = httpx.Client(base_url=server.url, timeout=300)

        def post(path: str, body: dict | None = None) -> dict:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def tokens() -> list[int]:
            return post("/v1/completions", prompt)["choices"][0]["token_ids"]

        before, awake = tokens(), torch.cuda.mem_get_info()[0]
        post("/sleep")
        assert torch.cuda.mem_get_info()[0] - awake >= 0.9 * kv
        post("/wake_up")
        assert tokens() == before
        for name in ("1", "0"):
            post("/sleep?level=2")
            post("/start_weight_update")
            post("/update_weights", {"update_info": {"path": name}})
            post("/finish_weight_update")
            post("/wake_up")
            assert (tokens() == before) == (name == "0")
