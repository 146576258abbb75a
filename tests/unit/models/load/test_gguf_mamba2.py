"""GGUF files with layers of Mamba-2 that say what no model has, or what a checkpoint has not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGUFValueType

from helpers.forward import Bench, load
from helpers.gguf_families import write_family_gguf
from helpers.gguf_files import rewritten
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.heads.own_module import open_module

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
KV_HEADS, FEATURES = "attention.head_count_kv", "feed_forward_length"


def changed(path, arch, metadata, tensors=()):
    def typed(value):
        kind = GGUFValueType.BOOL if value is True else GGUFValueType.UINT32
        return (value, GGUFValueType.ARRAY if type(value) is list else kind, kind)

    keys = {f"{arch}.{key}": typed(value) for key, value in metadata.items()}
    return rewritten(path, path.with_name("changed.gguf"), keys, tensors)


@pytest.mark.parametrize(
    ("arch", "metadata", "error", "message"),
    [
        ("nemotron_h", {KV_HEADS: [0, 0, 1]}, CheckpointError, r"=\[0, 0, 1\] is no count"),
        ("nemotron_h", {KV_HEADS: [0] * 5}, CheckpointError, "lacks the tensor .*layers.2.mixer"),
        ("nemotron_h", {FEATURES: [0, 7, 0, 0, 7]}, CheckpointError, r"mixer\.up_proj.* shape"),
        ("nemotron_h_moe", {"expert_gating_func": 1}, UnsupportedError, "gating_func=1 is not"),
        ("nemotron_h_moe", {"expert_count": 3}, CheckpointError, r"mixer\.gate.* shape"),
        ("granitehybrid", {"ssm.inner_size": 60}, CheckpointError, "do not have the .* features"),
        ("granitehybrid", {"ssm.group_count": 3}, CheckpointError, "4 Mamba-2 heads in 3 groups"),
        ("granitehybrid", {"rope.scaling.finetuned": True}, UnsupportedError, "attention.scale="),
        ("falcon-h1", {"ssm.state_size": None}, CheckpointError, "ssm.state_size=None is not a"),
    ],
)
def test_spoilt_files_are_refused_by_name(tmp_path, arch, metadata, error, message):
    _, path = write_family_gguf(tmp_path / "model", arch)
    with pytest.raises(error, match=message):
        load(changed(path, arch, metadata))


def test_half_of_a_head_of_bamba_is_rotated_whatever_a_file_says(tmp_path):
    _, path = write_family_gguf(tmp_path / "model", "granitehybrid-bamba")
    with pytest.raises(UnsupportedError, match="attn_rotary_emb=6 where 4 elements"):
        load(changed(path, "granitehybrid", {"rope.dimension_count": 6}))


def test_a_module_of_nemotron_is_passed_over(tmp_path):
    """Files hold it in more than one form."""
    directory, path = write_family_gguf(tmp_path / "model", "nemotron_h_moe")
    keys = {
        "block_count": 6,
        "nextn_predict_layers": 1,
        KV_HEADS: [0, 0, 1, 0, 0, 1],
        FEATURES: [0, 12, 0, 0, 12, 12],
    }
    own = {"blk.5.nextn.eh_proj.weight": np.zeros((16, 32), np.float32)}
    path = changed(path, "nemotron_h_moe", keys, own)
    assert torch.equal(*(Bench(load(each)).logits(PROMPT, []) for each in (path, directory)))
    with pytest.raises(CheckpointError, match="holds no multi-token-prediction module"):
        open_module(path)
