"""Every option that the user did not set has a reason, on both kinds of device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sametoken.config import EngineConfig
from sametoken.engine.reasons import reasons_of_defaults

OPTIONS = {field.name for field in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_default_has_a_reason(device):
    reasons = reasons_of_defaults(EngineConfig(), device)
    assert set(reasons) == OPTIONS
    assert all(reasons.values())


def test_what_the_user_set_has_none():
    given = EngineConfig(model="tiny", max_num_seqs=3, num_kv_blocks=8, device="cpu")
    reasons = reasons_of_defaults(given, "cpu")
    assert OPTIONS - set(reasons) == {"model", "max_num_seqs", "num_kv_blocks", "device"}
    assert reasons["kv_cache_memory_bytes"] == "num_kv_blocks decides"
    assert reasons["block_size"] == "the default of a CPU"


def test_devices_differ():
    on_cpu, on_gpu = (reasons_of_defaults(EngineConfig(), kind) for kind in ("cpu", "cuda"))
    assert (on_cpu["device"], on_gpu["device"]) == ("there is no GPU", "there is a GPU")
    assert on_cpu["kv_cache_memory_bytes"] == "1.0 GiB on a CPU"
    assert on_gpu["kv_cache_memory_bytes"] == "what gpu_memory_utilization leaves"


def test_a_gpu_that_is_left_alone_is_not_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    reason = reasons_of_defaults(EngineConfig(), "cpu")["device"]
    assert reason == "kernels need compute capability 7.5, this one has 7.0"
