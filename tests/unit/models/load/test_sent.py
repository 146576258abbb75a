"""Tensors in memory are read like a checkpoint's: in views of whole rows, each name once."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from sametoken.errors import CheckpointError, UnsupportedError, WeightUpdateError
from sametoken.models.load import sources
from sametoken.models.load.sent import SentTensors, source_of


def test_chunks_are_views_of_whole_rows(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_ELEMENTS", 6)
    parameter = torch.nn.Parameter(torch.arange(14.0).view(7, 2))
    source = SentTensors(iter([("w", parameter), ("s", torch.zeros(2, dtype=torch.int64))]))
    chunks = list(source.chunks("w"))
    assert [len(chunk) for chunk in chunks] == [3, 3, 1]
    assert torch.equal(torch.cat(chunks), parameter.detach())
    assert chunks[0].data_ptr() == parameter.data_ptr()
    assert not chunks[0].requires_grad
    assert (set(source.names()), source.shape("w")) == ({"w", "s"}, (7, 2))


def test_only_floating_tensors_are_read():
    source = SentTensors([("model.w", torch.zeros(2, dtype=torch.int8))])
    with pytest.raises(UnsupportedError, match=r"model\.w"):
        list(source.chunks("model.w"))


class Part(torch.Tensor):
    """What a ``DTensor`` is beside a tensor."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (torch.zeros(2).to_sparse(), "to_dense"),
        (torch.zeros(2, device="meta"), "without values"),
        (torch.zeros(2).as_subclass(Part), "full_tensor"),
    ],
)
def test_only_dense_tensors_with_their_values_are_taken(bad, says):
    with pytest.raises(WeightUpdateError, match=rf"model\.w.*{says}"):
        SentTensors([("model.w", bad)])


def test_what_is_no_pair_and_what_comes_twice_is_refused():
    one = ("model.w", torch.zeros(2))
    for pairs in ([one, one], [("model.w", [0.0])], [("model.w",)], ["model.w"]):
        with pytest.raises(WeightUpdateError, match=r"model\.w"):
            SentTensors(pairs)
    with pytest.raises(WeightUpdateError, match="of type NoneType"):
        source_of(None)


def test_a_directory_is_read_in_their_place(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert set(source_of(str(tmp_path)).names()) == {"w"}
    with pytest.raises(CheckpointError, match="no directory"):
        source_of(tmp_path / "nowhere")


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_tensors_without_elements_have_no_chunk_with_any(shape):
    source = SentTensors([("model.w", torch.zeros(shape))])
    assert sum(chunk.numel() for chunk in source.chunks("model.w")) == 0
