"""The multi-token-prediction module against its definition in plain PyTorch."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from helpers.checkpoints import HIDDEN, VOCAB, write_checkpoint, write_llama
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
from helpers.hybrids import (
    EPS,
    EXPERTS,
    hybrid_config,
    hybrid_tensors,
    merged_experts,
    without_mtp,
    write_hybrid,
)
from sametoken.errors import CheckpointError, DrafterMismatchError, UnsupportedError
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.loader import read_config

LAYER = "mtp.layers.0"


def norm(tensors, x, name):
    return rms_norm(x, 1 + tensors[f"{name}.weight"], EPS)


def attention(tensors, x):
    """Two heads of 8 over one key-value head; every head's query is followed by its gate."""
    prefix = f"{LAYER}.self_attn"
    q, gate = linear(tensors, x, f"{prefix}.q_proj").view(-1, 2, 16).chunk(2, dim=-1)
    k, v = (linear(tensors, x, f"{prefix}.{name}_proj").view(-1, 1, 8) for name in "kv")
    q = rotated(norm(tensors, q, f"{prefix}.q_norm").transpose(0, 1), 4, 1000.0)
    k = rotated(norm(tensors, k, f"{prefix}.k_norm").transpose(0, 1), 4, 1000.0)
    gated = attended(q, k, v.transpose(0, 1)) * gate.flatten(1).sigmoid()
    return linear(tensors, gated, f"{prefix}.o_proj")


def mlp(tensors, x):
    prefix = f"{LAYER}.mlp"
    if f"{prefix}.gate.weight" not in tensors:
        return gated_mlp(tensors, x, prefix)
    weights, chosen = linear(tensors, x, f"{prefix}.gate").softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    shared = gated_mlp(tensors, x, f"{prefix}.shared_expert")
    out = shared * linear(tensors, x, f"{prefix}.shared_expert_gate").sigmoid()
    for row in range(len(x)):
        for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
            name = f"{prefix}.experts.{expert}"
            out[row] += weight * gated_mlp(tensors, x[row : row + 1], name)[0]
    return out


def defined_module(tensors, embedding, token_ids, hidden):
    """The whole sequence at once: what logits are made from, and what is fed back."""
    embedded = norm(tensors, embedding[token_ids], "mtp.pre_fc_norm_embedding")
    hidden = norm(tensors, hidden, "mtp.pre_fc_norm_hidden")
    x = linear(tensors, torch.cat((embedded, hidden), -1), "mtp.fc")
    x = x + attention(tensors, norm(tensors, x, f"{LAYER}.input_layernorm"))
    x = x + mlp(tensors, norm(tensors, x, f"{LAYER}.post_attention_layernorm"))
    return norm(tensors, x, "mtp.norm")


@both_kernels
@pytest.mark.parametrize(
    ("kind", "changes", "merge"),
    [
        ("qwen3_5", {}, False),
        ("qwen3_5", EXPERTS, True),
        ("qwen3_5", EXPERTS, False),
        ("qwen3_next", {}, False),
        ("qwen3_next", {}, True),
        ("qwen3_next", {"decoder_sparse_step": 1, "num_nextn_predict_layers": 1}, False),
    ],
)
def test_logits_and_states_are_those_of_the_definition(tmp_path, kind, changes, merge, kernels):
    config = hybrid_config(kind, **changes)
    tensors, target = hybrid_tensors(config, seed=5), SharedTarget()
    write_checkpoint(tmp_path, config, merged_experts(tensors) if merge else tensors)
    head = load_sharing(MTPCheckpoint(tmp_path), kernels)
    define = partial(defined_module, tensors, target.embedding_matrix)
    require_defined_states(head, define, target.head_matrix, tolerance=1e-5)


@both_kernels
@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_rows_that_are_not_kept_leave_their_kv_alone(tmp_path, changes, kernels):
    config = hybrid_config("qwen3_5", **changes)
    write_checkpoint(tmp_path, config, hybrid_tensors(config, seed=5))
    head = load_sharing(MTPCheckpoint(tmp_path), kernels)
    require_kept_rows_alone(head, VOCAB, HIDDEN)


def test_it_reads_what_the_target_makes_its_logits_from(tmp_path):
    checkpoint = MTPCheckpoint(write_hybrid(tmp_path))
    head = checkpoint.load(SharedTarget(), **OPTIONS)
    require_reads_what_logits_are_made_from(head)
    assert checkpoint.aux_layers(4) == ()
    assert head.token_ids is None
    assert [cache.dtype for cache in head.caches] == [torch.float32]


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_a_checkpoint_without_the_module_is_refused(tmp_path, kind):
    config = hybrid_config(kind)
    write_checkpoint(tmp_path, config, without_mtp(hybrid_tensors(config)))
    with pytest.raises(CheckpointError, match=r"holds no multi-token-prediction module") as caught:
        MTPCheckpoint(tmp_path)
    assert "use the published checkpoint" in caught.value.remedy


def test_a_config_without_the_module_is_refused(tmp_path):
    write_hybrid(tmp_path, mtp_num_hidden_layers=0)
    with pytest.raises(CheckpointError, match="holds no multi-token-prediction module"):
        MTPCheckpoint(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3_5", {"mtp_num_hidden_layers": 2}, "of 2 layers"),
        ("qwen3_next", {"num_nextn_predict_layers": 3}, "of 3 layers"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "its own embedding"),
    ],
)
def test_other_forms_of_the_module_are_refused(tmp_path, kind, changes, message):
    write_hybrid(tmp_path, kind, **changes)
    with pytest.raises(UnsupportedError, match=message) as caught:
        MTPCheckpoint(tmp_path)
    assert caught.value.remedy


def test_another_architecture_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match="method 'mtp' does not run with LlamaForCausalLM"):
        MTPCheckpoint(write_llama(tmp_path))


def test_another_target_is_refused(tmp_path):
    checkpoint = MTPCheckpoint(write_hybrid(tmp_path / "a"))
    checkpoint.require_fit(checkpoint.config)
    with pytest.raises(DrafterMismatchError, match="23 tokens, the target has 29"):
        checkpoint.require_fit(read_config(write_hybrid(tmp_path / "b", vocab_size=29)))


def test_tensors_must_be_those_of_the_module(tmp_path):
    config = hybrid_config("qwen3_5")
    tensors = hybrid_tensors(config)
    missing = {name: t for name, t in tensors.items() if name != f"{LAYER}.self_attn.q_norm.weight"}
    write_checkpoint(tmp_path / "missing", config, missing)
    with pytest.raises(CheckpointError, match=r"lacks the tensor mtp\.layers\.0\.self_attn\.q_n"):
        MTPCheckpoint(tmp_path / "missing").load(SharedTarget(), **OPTIONS)
    surprise = tensors | {"mtp.layers.1.input_layernorm.weight": torch.zeros(HIDDEN)}
    write_checkpoint(tmp_path / "surprise", config, surprise)
    with pytest.raises(UnsupportedError, match=r"does not use: mtp\.layers\.1"):
        MTPCheckpoint(tmp_path / "surprise").load(SharedTarget(), **OPTIONS)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_dummy_weights_need_the_config_alone(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps(hybrid_config(kind)))
    head = MTPCheckpoint(tmp_path, load_format="dummy").load(SharedTarget(), **OPTIONS)
    hidden, kv = torch.randn(3, HIDDEN), empty_kv(head)
    states = head.forward(torch.tensor([1, 2, 3]), hidden, rows_of_one_slot(0, 3), kv)
    assert head.compute_logits(states.last).isfinite().all()
    with pytest.raises(CheckpointError, match="no safetensors"):
        MTPCheckpoint(tmp_path)
