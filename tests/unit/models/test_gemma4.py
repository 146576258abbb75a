"""Gemma 4's checkpoints: what they hold beside the model, and what cannot be run."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import change_config, change_tensors, read_checkpoint
from helpers.families import write_family
from helpers.forward import Bench, load, require_logits_by_kernels
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.triton import TritonKernels


@pytest.fixture
def checkpoint(tmp_path):
    return write_family(tmp_path, "gemma4")


def test_projections_of_layers_that_read_another_s_kv_are_not_read(checkpoint):
    """Published checkpoints have them."""
    wanted = Bench(load(checkpoint)).logits([1, 2, 3], [])
    prefix = "model.layers.2.self_attn"
    unread = {f"{prefix}.{name}.weight": torch.ones(3) for name in ("k_proj", "v_proj", "k_norm")}
    assert not unread.keys() & read_checkpoint(checkpoint)[1].keys()
    change_tensors(checkpoint, lambda tensors: tensors | unread)
    assert torch.equal(Bench(load(checkpoint)).logits([1, 2, 3], []), wanted)
    change_tensors(checkpoint, lambda tensors: tensors | {f"{prefix}.sinks": torch.ones(3)})
    with pytest.raises(UnsupportedError, match=r"does not use: model.layers.2.self_attn.sinks"):
        load(checkpoint)


def test_embeddings_by_layer_cover_the_vocabulary(checkpoint):
    change_config(checkpoint, vocab_size_per_layer_input=60)
    with pytest.raises(CheckpointError, match="vocab_size_per_layer_input=60 is below vocab_size"):
        load(checkpoint)


def test_a_gpu_serves_the_heads_of_published_models(tmp_path):
    checkpoint = write_family(tmp_path, "gemma4", global_head_dim=512)
    require_logits_by_kernels(checkpoint, [1, 2, 3, 4], [3])


def test_a_gpu_refuses_heads_that_do_not_fit(checkpoint):
    heads = {"head_dim": 1024, "num_key_value_heads": 2}
    change_config(checkpoint, per_layer_config={"1": heads, "2": heads})
    with pytest.raises(UnsupportedError, match="head_dim 1024 is above 512"):
        load(checkpoint, TritonKernels(GemmTable()))
