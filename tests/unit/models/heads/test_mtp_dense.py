"""The modules of ERNIE 4.5 and MiMo against their definitions in plain PyTorch."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from helpers.checkpoints import HIDDEN, LLAMA, VOCAB, change_config, write_checkpoint
from helpers.dense_modules import (
    ARCHITECTURES,
    ERNIE,
    MIMO,
    MIMO_NORM,
    NAMES,
    module_tensors,
)
from helpers.heads import (
    OPTIONS,
    SharedTarget,
    attended,
    both_kernels,
    empty_kv,
    gated_mlp,
    linear,
    load_sharing,
    require_defined_states,
    require_kept_rows_alone,
    require_reads_what_logits_are_made_from,
    rms_norm,
    rotated,
    rows_of_one_slot,
)
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.base import HiddenStates
from sametoken.models.heads.mtp import MTPCheckpoint

KINDS = pytest.mark.parametrize("kind", [ERNIE, MIMO])


def write(directory, kind, drop=()):
    """A module alone, beside the config of a target of ``LLAMA``'s sizes."""
    tensors = module_tensors(kind, LLAMA, seed=5)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(drop)}
    config = LLAMA | {"architectures": [ARCHITECTURES[kind]], "num_nextn_predict_layers": 1}
    write_checkpoint(directory, config, kept)
    return tensors


def turned(y):
    """[heads, T, 8]: neighbours are a pair."""
    angles = torch.arange(y.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    pairs = torch.view_as_complex(y.unflatten(-1, (4, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def defined_module(kind, tensors, target, token_ids, hidden):
    """The whole sequence at once: what logits are made from, and what is fed back."""
    embedding_norm, hidden_norm, fusion, layer = NAMES[kind]

    def norm(x, name):
        return rms_norm(x, tensors[f"{name}.weight"])

    embedded = target.embedding_matrix[token_ids].clone()
    if kind == MIMO:
        embedded[0] = 0
    halves = norm(embedded, embedding_norm), norm(hidden, hidden_norm)
    x = linear(tensors, torch.cat(halves if kind == ERNIE else halves[::-1], -1), fusion)
    normed = norm(x, f"{layer}.input_layernorm")
    q, k, v = (
        linear(tensors, normed, f"{layer}.self_attn.{name}_proj").view(-1, heads, 8).transpose(0, 1)
        for name, heads in (("q", 2), ("k", 1), ("v", 1))
    )
    turn = turned if kind == ERNIE else rotated
    x = x + linear(tensors, attended(turn(q), turn(k), v), f"{layer}.self_attn.o_proj")
    x = x + gated_mlp(tensors, norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
    last = target.final_norm.weight if kind == ERNIE else tensors[f"{MIMO_NORM}.weight"]
    return rms_norm(x, last)


@both_kernels
@KINDS
def test_logits_and_states_are_those_of_the_definition(tmp_path, kind, kernels):
    tensors, target = write(tmp_path, kind), SharedTarget()
    head = load_sharing(MTPCheckpoint(tmp_path), kernels)
    define = partial(defined_module, kind, tensors, target)
    require_defined_states(head, define, target.head_matrix, tolerance=1e-5)
    require_kept_rows_alone(head, VOCAB, HIDDEN)


def test_ernie_s_reads_what_the_target_makes_its_logits_from(tmp_path):
    write(tmp_path, ERNIE)
    checkpoint, target = MTPCheckpoint(tmp_path), SharedTarget()
    head = checkpoint.load(target, **OPTIONS)
    require_reads_what_logits_are_made_from(head)
    assert head.module.norm is target.final_norm
    assert checkpoint.aux_layers(4) == ()


def test_ernie_s_projection_may_be_stored_as_its_transpose(tmp_path):
    """sgl-project/sglang#7657: so Baidu published that of ERNIE-4.5-300B-A47B-PT."""
    tensors = write(tmp_path / "usual", ERNIE)
    fusion = f"{NAMES[ERNIE][2]}.weight"
    config = LLAMA | {"architectures": [ARCHITECTURES[ERNIE]]}
    write_checkpoint(
        tmp_path / "transposed", config, tensors | {fusion: tensors[fusion].T.contiguous()}
    )
    usual, transposed = (
        MTPCheckpoint(tmp_path / name).load(SharedTarget(), **OPTIONS).module.fc.weight
        for name in ("usual", "transposed")
    )
    rows = torch.arange(HIDDEN)
    assert torch.equal(usual.rows(rows), tensors[fusion])
    assert torch.equal(transposed.rows(rows), tensors[fusion])


def test_mimo_s_reads_the_target_s_states_before_its_final_norm(tmp_path):
    write(tmp_path, MIMO)
    checkpoint = MTPCheckpoint(tmp_path)
    head = checkpoint.load(SharedTarget(), **OPTIONS)
    hidden, rows = (
        HiddenStates(torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)),
        torch.tensor([3, 0]),
    )
    before = hidden.auxiliary.clone()
    assert torch.equal(head.target_states(hidden, rows), before[rows])
    given = head.target_states(hidden, None)
    head.forward(torch.arange(5), given, rows_of_one_slot(0, 5), empty_kv(head))
    assert torch.equal(hidden.auxiliary, before)
    assert checkpoint.aux_layers(4) == (4,)


@KINDS
def test_a_checkpoint_without_the_module_or_with_several_is_refused(tmp_path, kind):
    write(tmp_path, kind, drop=f"{NAMES[kind][2]}.")
    with pytest.raises(CheckpointError, match="holds no multi-token-prediction module") as caught:
        MTPCheckpoint(tmp_path)
    assert caught.value.remedy
    change_config(tmp_path, num_nextn_predict_layers=2)
    with pytest.raises(UnsupportedError, match="of 2 layers"):
        MTPCheckpoint(tmp_path)


@KINDS
def test_a_module_that_lacks_a_tensor_is_refused(tmp_path, kind):
    for name in module_tensors(kind, LLAMA):
        if name.startswith(NAMES[kind][2]):
            continue
        write(tmp_path, kind, drop=name)
        with pytest.raises(CheckpointError, match=f"lacks the tensor {name.replace('.', '[.]')}"):
            MTPCheckpoint(tmp_path).load(SharedTarget(), **OPTIONS)
