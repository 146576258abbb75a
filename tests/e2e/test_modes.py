"""Modes of torch that a trainer has set in the process or thread of an engine change no bit."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache

import pytest
import torch

from helpers.checkpoints import write_llama
from helpers.nemotron import write_nemotron
from helpers.updates import NGRAM, engine, said, tensors_of
from sametoken.engine.modes import without_modes


@contextmanager
def default_dtype():
    """Of all threads."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


#: On the meta device a tensor that names no other has no values.
MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default_device": lambda: torch.device("meta"),
    "default_dtype": default_dtype,
    "inference_mode": torch.inference_mode,
}
WRITERS = {"llama": write_llama, "nemotron": write_nemotron}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes")
    return {
        name: [write(folder / f"{name}-{seed}", seed) for seed in (0, 1)]
        for name, write in WRITERS.items()
    }


@cache
def answers(path, kernels: str):
    return said(engine(path))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "kernels"), [("llama", "reference"), ("nemotron", "native")])
def test_what_an_engine_says_is_the_same_in_every_mode(name, kernels, mode, paths, monkeypatch):
    monkeypatch.setenv("SAMETOKEN_KERNELS", kernels)
    old, new = paths[name]
    wanted = [answers(path, kernels) for path in (old, new)]
    with MODES[mode]():
        live = engine(old, NGRAM)
        found = said(live)
    assert found == said(live) == wanted[0]
    sent = tensors_of(new)
    with MODES[mode]():
        live.update_weights(sent.items())
    assert said(live) == wanted[1]
    live.update_weights(tensors_of(old).items())
    with MODES[mode]():
        assert said(live) == wanted[0]


def test_a_caller_has_its_modes_again():
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        with without_modes():
            assert torch.zeros(1, dtype=torch.float32).device.type == "cpu"
            assert not torch.is_autocast_enabled("cpu")
        assert torch.zeros(1, dtype=torch.float32).is_meta
        assert torch.is_autocast_enabled("cpu")
