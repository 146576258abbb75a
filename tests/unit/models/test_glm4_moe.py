"""GLM-4 MoE: the module that predicts further tokens is not read, sizes are checked."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.families import write_family
from helpers.forward import CPU
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.loader import load_model, read_config
from sametoken.models.registry import require_divisible
from sametoken.ops.reference import ReferenceKernels


def load(path):
    return load_model(
        path, kernels=ReferenceKernels(), dtype=torch.float32, device=CPU, max_positions=16
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("glm"), "glm4_moe")


@pytest.fixture
def checkpoint(written, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((written / name).read_bytes())
    return tmp_path


def rewrite(checkpoint, **changes):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(("layer", "known"), [(3, True), (4, False), (30, False)])
def test_the_next_layer_s_tensors_alone_are_left(checkpoint, layer, known):
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[f"model.layers.{layer}.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, checkpoint / "model.safetensors")
    if known:
        assert load(checkpoint).config.num_layers == 3
    else:
        with pytest.raises(UnsupportedError, match=rf"model\.layers\.{layer}\.eh_proj"):
            load(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 4}, "n_group=4 does not divide 6 experts"),
        ({"n_routed_experts": 10**9}, "n_routed_experts=1000000000 is not at most"),
        ({"n_routed_experts": 8}, r"has shape \[6, 32\], the config expects \[8, 32\]"),
        ({"first_k_dense_replace": "one"}, "first_k_dense_replace='one'"),
        ({"routed_scaling_factor": -1}, "routed_scaling_factor=-1"),
    ],
)
def test_impossible_sizes_are_named(checkpoint, changes, message):
    rewrite(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)


def test_ranks_divide_experts_and_the_dense_layers_that_there_are(checkpoint):
    assert "moe_intermediate_size" in load(checkpoint).divided_sizes(read_config(checkpoint))
    require_divisible(read_config(checkpoint), 2)
    rewrite(checkpoint, first_k_dense_replace=0, intermediate_size=47)
    require_divisible(read_config(checkpoint), 2)
