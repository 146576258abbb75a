"""The bar of weights: on a terminal of rank 0, nowhere else, and what is read stays the same."""

from __future__ import annotations

import io

import pytest
import torch

from helpers.checkpoints import write_llama
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.progress import shown_while_read


class Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def read_all(directory, monkeypatch, *, is_terminal: bool, leads: bool = True) -> str:
    """What stderr shows while every tensor is read through the bar, and compared."""
    stderr = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    source = open_weights(directory)
    with shown_while_read(source, torch.bfloat16, leads=leads) as watched:
        assert watched.location == source.location
        assert watched.names() == source.names()
        for name in source.names():
            assert watched.shape(name) == source.shape(name)
            for found, expected in zip(watched.chunks(name), source.chunks(name), strict=True):
                assert torch.equal(found, expected)
    return stderr.getvalue()


@pytest.fixture
def checkpoint(tmp_path):
    return write_llama(tmp_path / "llama")


def test_a_terminal_sees_all_bytes_in_the_dtype_of_memory(checkpoint, monkeypatch):
    shown = read_all(checkpoint, monkeypatch, is_terminal=True)
    source = open_weights(checkpoint)
    num_bytes = 2 * sum(torch.Size(source.shape(name)).numel() for name in source.names())
    assert "loading" in shown
    assert f"{num_bytes / 1024:.1f}/{num_bytes / 1024:.1f} KiB" in shown


@pytest.mark.parametrize(("is_terminal", "leads"), [(False, True), (True, False)])
def test_a_pipe_and_a_following_rank_show_nothing(checkpoint, monkeypatch, is_terminal, leads):
    assert read_all(checkpoint, monkeypatch, is_terminal=is_terminal, leads=leads) == ""


def test_a_process_without_stderr_shows_nothing(checkpoint, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    source = open_weights(checkpoint)
    with shown_while_read(source, torch.bfloat16, leads=True) as watched:
        assert watched is source
