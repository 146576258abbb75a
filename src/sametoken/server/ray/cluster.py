"""The Ray cluster at hand: joining it, what it has, what it says went wrong."""

from __future__ import annotations

import ray
import torch

from sametoken.config import EngineConfig
from sametoken.engine.resolve import resolve_sizes


def connect() -> bool:
    """Join the cluster of this process, of this machine or of RAY_ADDRESS, or start one.

    Returns:
        Whether it was started here.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        ray.init(include_dashboard=False)
        return True
    return False


def device_on_ray(device: str) -> str:
    """What engines run on: what was asked for, else GPUs if the cluster has any."""
    if device != "auto":
        return device
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def num_gpus(config: EngineConfig) -> int:
    """GPUs of one engine, whose device is not ``auto`` any more."""
    return config.tensor_parallel_size if config.device == "cuda" else 0


def num_slots(config: EngineConfig) -> int:
    """Requests that one engine runs at once, whose device is not ``auto`` any more."""
    return resolve_sizes(config, torch.device(config.device)).max_num_seqs


def last_line(text: str) -> str:
    """The line of a remote traceback that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"
