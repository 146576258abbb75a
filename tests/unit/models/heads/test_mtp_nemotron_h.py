"""Nemotron-3's multi-token-prediction module against its definition in plain PyTorch."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from helpers.checkpoints import HIDDEN, VOCAB, write_checkpoint
from helpers.heads import (
    OPTIONS,
    SharedTarget,
    attended,
    both_kernels,
    linear,
    load_sharing,
    require_defined_states,
    require_kept_rows_alone,
    require_reads_what_logits_are_made_from,
    rms_norm,
)
from helpers.nemotron import EPS, nemotron_config, nemotron_tensors, write_nemotron
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.heads.mtp import MTPCheckpoint

FIRST, LAST = "mtp.layers.0", "mtp.layers.1"
LATENT = {"moe_latent_size": 6}


def norm(tensors, x, name):
    return rms_norm(x, tensors[f"{name}.weight"], EPS)


def attention(tensors, x):
    """Two heads of 8 over one key-value head, none of them rotated."""
    q, k, v = (
        linear(tensors, x, f"{FIRST}.mixer.{name}_proj").view(len(x), -1, 8).transpose(0, 1)
        for name in "qkv"
    )
    return linear(tensors, attended(q, k, v), f"{FIRST}.mixer.o_proj")


def squared_relu(tensors, x, name):
    return linear(tensors, linear(tensors, x, f"{name}.up_proj").relu() ** 2, f"{name}.down_proj")


def experts(tensors, x, prefix=f"{LAST}.mixer"):
    """Two of four, chosen by score plus correction and weighted by score, times 2.5."""
    score = linear(tensors, x, f"{prefix}.gate").sigmoid()
    chosen = (score + tensors[f"{prefix}.gate.e_score_correction_bias"]).topk(2).indices
    weights = score.gather(1, chosen)
    weights = 2.5 * weights / weights.sum(-1, keepdim=True)
    is_latent = f"{prefix}.fc1_latent_proj.weight" in tensors
    into = linear(tensors, x, f"{prefix}.fc1_latent_proj") if is_latent else x
    out = torch.zeros_like(into)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
            name = f"{prefix}.experts.{expert}"
            out[row] += weight * squared_relu(tensors, into[row : row + 1], name)[0]
    out = linear(tensors, out, f"{prefix}.fc2_latent_proj") if is_latent else out
    return out + squared_relu(tensors, x, f"{prefix}.shared_experts")


def defined_module(tensors, embedding, token_ids, hidden):
    """The whole sequence at once: what logits are made from, and what is fed back."""
    embedded = norm(tensors, embedding[token_ids], f"{FIRST}.enorm")
    hidden = norm(tensors, hidden, f"{FIRST}.hnorm")
    x = linear(tensors, torch.cat((embedded, hidden), -1), f"{FIRST}.eh_proj")
    x = x + attention(tensors, norm(tensors, x, f"{FIRST}.norm"))
    x = x + experts(tensors, norm(tensors, x, f"{LAST}.norm"))
    return norm(tensors, x, f"{LAST}.final_layernorm")


@both_kernels
@pytest.mark.parametrize("changes", [{}, LATENT], ids=["full", "latent"])
def test_logits_and_states_are_those_of_the_definition(tmp_path, changes, kernels):
    config = nemotron_config(**changes)
    tensors, target = nemotron_tensors(config, seed=5), SharedTarget()
    write_checkpoint(tmp_path, config, tensors)
    head = load_sharing(MTPCheckpoint(tmp_path), kernels)
    define = partial(defined_module, tensors, target.embedding_matrix)
    require_defined_states(head, define, target.head_matrix, tolerance=1e-5)
    require_kept_rows_alone(head, VOCAB, HIDDEN)
    require_reads_what_logits_are_made_from(head)


def test_sizes_of_puzzle_s_module_are_its_own(tmp_path):
    own = {"moe_intermediate_size": 8, "num_experts_per_tok": 1}
    blocks = [{"block_type": "attention"}, {"block_type": "moe", **own}]
    changes = {"mtp_block_configs": blocks, "mtp_n_routed_experts": 3}
    tensors = nemotron_tensors(nemotron_config(n_routed_experts=3, **own))
    write_checkpoint(tmp_path, nemotron_config(**changes), tensors)
    mixture = MTPCheckpoint(tmp_path).load(SharedTarget(), **OPTIONS).module.layer.mlp
    assert (mixture.routing.top_k, mixture.router.weight.out_features) == (1, 3)


@pytest.mark.parametrize("changes", [{"num_nextn_predict_layers": 0}, {"kept": ()}])
def test_a_checkpoint_without_the_module_is_refused(tmp_path, changes):
    config = nemotron_config(**changes)
    tensors = nemotron_tensors(config)
    if "kept" in changes:
        tensors = {name: t for name, t in tensors.items() if not name.startswith("mtp.")}
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match="holds no multi-token-prediction module"):
        MTPCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "of 2 layers"),
        ({"mtp_hybrid_override_pattern": "ME"}, "'linear_attention'"),
        ({"mtp_layers_block_type": ["attention"]}, "'full_attention'"),
    ],
)
def test_other_forms_of_the_module_are_refused(tmp_path, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        MTPCheckpoint(write_nemotron(tmp_path, **changes))
