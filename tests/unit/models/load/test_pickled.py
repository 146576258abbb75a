"""Pickled checkpoints are the same models, and hold tensors alone."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import (
    VOCAB,
    as_pickle,
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_llama,
    write_speculators,
)
from helpers.forward import Bench, load
from helpers.harness import run
from helpers.small_engines import build, plain, requests
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.load.files import INDEX_PICKLED
from sametoken.models.load.pickled import PickledSource, load_tensors

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def logits(path):
    return Bench(load(path), max_len=16).logits(PROMPT, [])


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_pickled_model_is_the_same(tmp_path, num_shards):
    expected = logits(write_llama(tmp_path / "a"))
    assert torch.equal(logits(as_pickle(write_llama(tmp_path / "b"), num_shards)), expected)


def test_safetensors_go_first(tmp_path):
    path = write_llama(tmp_path)
    expected = logits(path)
    (path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert torch.equal(logits(path), expected)


def test_a_format_that_is_asked_for_is_kept_to(tmp_path):
    path = as_pickle(write_llama(tmp_path))
    with pytest.raises(UnsupportedError, match="pickled weights only"):
        load(path, load_format="safetensors")


def test_a_missing_shard_and_two_of_one_name(tmp_path):
    path = as_pickle(write_llama(tmp_path), 3)
    shards = sorted(path.glob("pytorch_model-*.bin"))
    with pytest.raises(CheckpointError, match="in another"):
        PickledSource(str(path), [shards[0], shards[0]])
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=r"lists pytorch_model-00002.*not there"):
        load(path)
    (path / INDEX_PICKLED).write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        load(path)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([torch.ones(2)], "EMPTY_LIST"),
        (torch.ones(2), "a Tensor, no dict of tensors"),
        ({"step": 3, "w": torch.ones(2)}, "'step', which is no tensor but int"),
        ({"model": {"w": torch.ones(2)}}, "'model', which is no tensor but dict"),
        ({3: torch.ones(2)}, "3, which is no tensor"),
        ({"w": torch.ones(2).to_sparse()}, "_rebuild_sparse_tensor"),
        ({"w": torch.Size((2,))}, "torch.Size"),
    ],
)
def test_other_things_than_tensors_are_named(tmp_path, value, what):
    torch.save(value, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=what) as caught:
        load_tensors(tmp_path / "pytorch_model.bin")
    assert "safetensors" in caught.value.remedy


def test_what_models_are_saved_as_loads(tmp_path):
    """A state dict with metadata, parameters, shared storage and views, from another device."""
    layer = torch.nn.Linear(3, 4)
    whole = torch.randn(6, 4)
    state = layer.state_dict() | {"parameter": layer.weight, "view": whole.t()[1:3]}
    torch.save(layer.state_dict(), tmp_path / "plain.bin")
    assert load_tensors(tmp_path / "plain.bin").keys() == {"weight", "bias"}
    torch.save(state, tmp_path / "pytorch_model.bin")
    found = load_tensors(tmp_path / "pytorch_model.bin")
    assert torch.equal(found["view"], whole.t()[1:3])
    assert not found["parameter"].requires_grad


def test_tensors_of_another_dtype_are_refused(tmp_path):
    torch.save({"w": torch.ones(4).int(), "f": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    source = PickledSource("here", [tmp_path / "pytorch_model.bin"])
    assert torch.equal(next(source.stored_chunks("w")), torch.ones(4).int())
    with pytest.raises(UnsupportedError, match=r"w of here has dtype torch\.int32"):
        next(source.chunks("w"))


def require_drafts(target, head, **spec):
    """That change no token."""
    drafted = run(build(target, {"model": str(head)} | spec, dtype="auto"), requests())
    assert drafted.offered
    assert drafted.tokens == plain(target, "auto")


def test_a_head_as_eagle_s_authors_publish_it(tmp_path):
    """As EAGLE-LLaMA3-Instruct-8B: a pickle in fp32 with the target's embedding, no bias of fc."""
    target = write_llama(tmp_path / "target", torch_dtype="bfloat16")
    tensors = eagle1_tensors() | {"embed_tokens.weight": torch.randn(VOCAB, 16)}
    head = as_pickle(write_eagle1(tmp_path / "head", tensors))
    require_drafts(target, head, num_speculative_tokens=3)


def test_a_head_in_the_layout_of_speculators(tmp_path):
    """As Qwen3-8B-speculator.eagle3: layers named, a token map, an embedding of its own."""
    target = write_llama(tmp_path / "target")
    methods = [{"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}]
    verifier = {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"}
    head = write_speculators(
        tmp_path / "head",
        head_tensors(own_embedding=True),
        layer={"model_type": "llama"},
        auto_map={"": "eagle3.Eagle3SpeculatorConfig"},
        speculators_config={
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": methods,
            "verifier": verifier,
        },
        speculators_version="0.1.0.dev42",
        torch_dtype="bfloat16",
    )
    require_drafts(target, head)
