"""Heads of the first EAGLE in both layouts against the definition in plain PyTorch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import (
    HIDDEN,
    VOCAB,
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_eagle1_speculators,
    write_safeailab,
    write_speculators,
)
from helpers.heads import (
    OPTIONS,
    SharedTarget,
    attended,
    both_kernels,
    gated_mlp,
    linear,
    load_sharing,
    require_defined_states,
    require_kept_rows_alone,
    require_reads_what_logits_are_made_from,
    require_target_of_its_sizes,
    rms_norm,
    rotated,
)
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.heads.eagle import Eagle1Checkpoint

WRITERS = {"safeailab": write_eagle1, "speculators": write_eagle1_speculators}


def load(directory, target=None):
    return Eagle1Checkpoint(directory).load(target or SharedTarget(), **OPTIONS)


def attention(tensors, x, prefix, window=None):
    """Two heads of 8 that share one key-value head."""
    projected = [linear(tensors, x, f"{prefix}.{name}_proj") for name in "qkv"]
    q, k, v = (y.view(len(y), -1, 8).transpose(0, 1) for y in projected)
    return linear(tensors, attended(rotated(q), rotated(k), v, window), f"{prefix}.o_proj")


def defined_head(tensors, embedding, token_ids, hidden, windows=(None,) * 3):
    """The whole sequence at once: what logits are made from and what is fed back."""

    def norm(x, name):
        return rms_norm(x, tensors[f"{name}.weight"])

    x, index = linear(tensors, torch.cat((embedding[token_ids], hidden), -1), "fc"), 0
    while f"layers.{index}.mlp.up_proj.weight" in tensors:
        layer = f"layers.{index}"
        inner = norm(x, f"{layer}.input_layernorm") if index else x
        x = x + attention(tensors, inner, f"{layer}.self_attn", windows[index])
        inner = norm(x, f"{layer}.post_attention_layernorm")
        x, index = x + gated_mlp(tensors, inner, f"{layer}.mlp"), index + 1
    return x


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("safeailab", {}),
        ("safeailab", {"fc_bias": True, "own": True}),
        ("safeailab", {"num_layers": 3}),
        ("safeailab", {"num_layers": 2, "fc_bias": True, "qkv_bias": True}),
        ("speculators", {}),
        ("speculators", {"fc_bias": True, "own": True}),
    ],
)
def test_logits_and_states_are_those_of_the_definition(tmp_path, layout, flags):
    tensors, target = eagle1_tensors(5, **flags), SharedTarget()
    head = load(WRITERS[layout](tmp_path, tensors), target)
    embedding = tensors.get("embed_tokens.weight", target.embedding_matrix)
    lm_head = tensors.get("lm_head.weight", target.head_matrix)
    require_defined_states(head, partial(defined_head, tensors, embedding), lm_head)


def test_each_layer_sees_its_own_window(tmp_path):
    tensors, target = eagle1_tensors(5, num_layers=3), SharedTarget()
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    head = load(write_eagle1(tmp_path, tensors, layer_types=kinds, sliding_window=3), target)
    windows = [cache.window for cache in head.caches]
    assert windows == [3, None, 3]
    definition = partial(defined_head, tensors, target.embedding_matrix, windows=windows)
    require_defined_states(head, definition, target.head_matrix)


@both_kernels
@pytest.mark.parametrize("num_layers", [1, 3])
def test_rows_that_are_not_kept_leave_their_kv_alone(tmp_path, num_layers, kernels):
    write_eagle1(tmp_path, eagle1_tensors(5, num_layers=num_layers))
    head = load_sharing(Eagle1Checkpoint(tmp_path), kernels)
    require_kept_rows_alone(head, VOCAB, HIDDEN)


def test_it_reads_what_the_target_makes_its_logits_from(tmp_path):
    head = load(write_eagle1(tmp_path, eagle1_tensors()))
    require_reads_what_logits_are_made_from(head)
    assert Eagle1Checkpoint(tmp_path).aux_layers(4) == ()


@pytest.mark.parametrize(
    ("settings", "tensors", "has_bias"),
    [
        ({}, {"fc_bias": True}, True),
        ({"bias": False}, {"fc_bias": True}, True),
        ({"bias": True}, {"fc_bias": True}, True),
        ({}, {}, False),
    ],
)
def test_the_tensors_say_whether_fc_has_a_bias(tmp_path, settings, tensors, has_bias):
    head = load(write_eagle1(tmp_path, eagle1_tensors(**tensors), **settings))
    assert (head.fc.bias is not None) == has_bias


def test_a_bias_that_the_config_promises_must_be_there(tmp_path):
    for directory in (
        write_eagle1(tmp_path / "a", eagle1_tensors(), bias=True),
        write_eagle1_speculators(tmp_path / "b", eagle1_tensors(), fusion_bias=True),
    ):
        with pytest.raises(CheckpointError, match=r"fc\.bias"):
            load(directory)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        load(write_eagle1(tmp_path / "c", eagle1_tensors(), qkv_bias=True))


def test_embedding_and_lm_head_come_from_the_target(tmp_path):
    target = SharedTarget()
    head = load(write_eagle1(tmp_path, eagle1_tensors()), target)
    assert head.embedding is target.embedding
    assert head.lm_head is target.head


def test_a_head_for_another_target_is_refused(tmp_path):
    write = partial(write_eagle1, tensors=eagle1_tensors())
    require_target_of_its_sizes(Eagle1Checkpoint, write, "hidden_size", tmp_path)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"layernorms": True}, "layernorms"),
        ({"add_para_norm": True}, "add_para_norm"),
        ({"speculators_model_type": "mtp"}, "mtp"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, settings, what):
    write_eagle1(tmp_path, eagle1_tensors(), **settings)
    with pytest.raises(UnsupportedError, match=what):
        Eagle1Checkpoint(tmp_path)


@pytest.mark.parametrize("write", [write_safeailab, write_speculators])
def test_an_eagle3_head_is_refused_by_name(tmp_path, write):
    with pytest.raises(UnsupportedError, match="'eagle3' drafter"):
        Eagle1Checkpoint(write(tmp_path, head_tensors()))


def test_broken_tensors_are_refused(tmp_path):
    write_eagle1(tmp_path, eagle1_tensors())
    for name, value in (
        ("fc.weight", None),
        ("fc.weight", torch.zeros(HIDDEN, 3 * HIDDEN)),
        ("layers.0.mlp.up_proj.weight", None),
    ):
        tensors = {key: t for key, t in eagle1_tensors().items() if key != name}
        if value is not None:
            tensors[name] = value
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path)
    for name in ("layers.0.input_layernorm.weight", "embed_layernorm.weight"):
        save_file(eagle1_tensors() | {name: torch.ones(HIDDEN)}, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedError, match=name):
            load(tmp_path)
