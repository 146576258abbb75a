"""A model divided among ranks: shares of the same weights, and nearly the same states."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.checkpoints import change_config, write_checkpoint, write_llama
from helpers.forward import TOKENS, load, logits_of
from helpers.gguf_files import convert
from helpers.hybrids import (
    EXPERTS,
    hybrid_config,
    hybrid_tensors,
    merged_experts,
    twin_config,
    twin_tensors,
    write_hybrid,
)
from helpers.nemotron import nemotron_config, write_nemotron
from helpers.thread_ranks import run_ranks
from sametoken.errors import CheckpointError, ConfigError
from sametoken.models.load import sources
from sametoken.models.loader import read_config
from sametoken.models.registry import require_divisible
from sametoken.ops.cache_types import bytes_per_block, bytes_per_slot
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

SIZES = {
    "vocab_size": 47,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
HYBRID_SIZES = SIZES | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
NEMOTRON_SIZES = SIZES | {"mamba_num_heads": 8, "n_groups": 4, "moe_latent_size": 16}
#: Which two ranks share.
ONE_KV_HEAD = {"num_key_value_heads": 1}


def write_qwen3(folder):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, num_hidden_layers=2, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def write_gguf(folder):
    torch.manual_seed(0)
    sizes = SIZES | ONE_KV_HEAD
    config = LlamaConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64)
    return convert(LlamaForCausalLM(config), folder / "model.gguf")


def write_merged(folder):
    """Experts stacked in one tensor, as Qwen3.5 is published."""
    config = hybrid_config("qwen3_5", **HYBRID_SIZES, **EXPERTS)
    return write_checkpoint(folder, config, merged_experts(hybrid_tensors(config)))


def write_biased(folder):
    config = twin_config(**HYBRID_SIZES | ONE_KV_HEAD)
    return write_checkpoint(folder, config, twin_tensors(config))


WRITERS = {
    "llama": lambda folder: write_llama(folder, **SIZES),
    "qwen3": write_qwen3,
    "gguf": write_gguf,
    "qwen3_5": lambda folder: write_hybrid(folder, "qwen3_5", **HYBRID_SIZES),
    "qwen3_5 with biases": write_biased,
    "qwen3_5 with experts": write_merged,
    "qwen3_next": lambda folder: write_hybrid(folder, "qwen3_next", **HYBRID_SIZES),
    "nemotron_h": lambda folder: write_nemotron(folder, **NEMOTRON_SIZES | ONE_KV_HEAD),
}


@pytest.mark.parametrize("backend", [ReferenceKernels, NativeKernels])
@pytest.mark.parametrize("kind", WRITERS)
def test_ranks_agree_and_are_near_one_rank(tmp_path, kind, backend):
    path = WRITERS[kind](tmp_path)
    kernels = backend()
    whole = logits_of(load(path, kernels=kernels))
    first, second = run_ranks(2, lambda p: logits_of(load(path, parallel=p, kernels=kernels)))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_next", "nemotron_h"])
def test_a_row_s_bits_do_not_depend_on_its_company(tmp_path, kind):
    path = WRITERS[kind](tmp_path)

    def run(parallel):
        model = load(path, parallel=parallel, dtype=torch.bfloat16)
        alone = logits_of(model, *[1] * len(TOKENS))
        return torch.equal(alone, logits_of(model))

    assert run_ranks(2, run) == [True, True]


def test_ranks_hold_shares_and_not_the_whole(tmp_path):
    path = write_llama(tmp_path, **SIZES)
    whole = load(path)
    ranks = run_ranks(2, lambda p: load(path, parallel=p))
    assert [{cache.num_kv_heads for cache in rank.caches} for rank in ranks] == [{1}, {1}]
    # The embedding is whole on every rank.
    divided = sum(rank.weights_bytes for rank in ranks) - 2 * whole.embedding.nbytes
    # Both have one row of the head, whose number of rows is odd.
    row_bytes = whole.embedding.nbytes // SIZES["vocab_size"]
    assert divided == whole.weights_bytes - whole.embedding.nbytes + row_bytes
    assert [rank.head.out_features for rank in ranks] == [24, 24]


def test_a_rank_has_the_kv_head_that_its_queries_read_and_no_other(tmp_path):
    """Of four ranks two and two have one."""
    path = write_llama(tmp_path, **SIZES)
    unit, head_dim = torch.eye(SIZES["hidden_size"]), SIZES["head_dim"]

    def projected(model):
        rows = model.layers[0].attention.qkv.weight.matmul(unit, out_dtype=torch.float32)
        shape = model.layers[0].attention.shape
        return [
            part.split(head_dim, dim=1)
            for part in rows.split((shape.q_size, shape.kv_size, shape.kv_size), dim=1)
        ]

    queries, *keys_and_values = projected(load(path))
    for index, rank in enumerate(run_ranks(4, lambda p: load(path, parallel=p))):
        assert {cache.num_kv_heads for cache in rank.caches} == {1}
        (query,), *own = projected(rank)
        assert torch.equal(query, queries[index])
        for (found,), whole in zip(own, keys_and_values, strict=True):
            assert torch.equal(found, whole[index // 2])


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5 with experts", "qwen3_next"])
def test_ranks_hold_shares_of_a_hybrid_and_of_its_state(tmp_path, kind):
    path = WRITERS[kind](tmp_path)
    whole = load(path)
    for rank in run_ranks(2, lambda p: load(path, parallel=p)):
        for cache, undivided in zip(rank.caches, whole.caches, strict=True):
            assert 2 * bytes_per_block([cache], 4) == bytes_per_block([undivided], 4)
            assert 2 * bytes_per_slot([cache], 3) == bytes_per_slot([undivided], 3)
        block, part = whole.layers[0].attention, rank.layers[0].attention
        assert 2 * part.nbytes == block.nbytes
        assert [2 * w.numel() for w in (part.params.A_log, part.params.conv_weight)] == [
            w.numel() for w in (block.params.A_log, block.params.conv_weight)
        ]
        mlp, share = whole.layers[0].mlp, rank.layers[0].mlp
        # Routers and gates are whole on every rank.
        undivided = 0 if kind == "qwen3_5" else mlp.routed.router.nbytes + mlp.shared.gate.nbytes
        assert 2 * (share.nbytes - undivided) == mlp.nbytes - undivided


@pytest.mark.parametrize(
    ("kind", "load_format"),
    [
        ("llama", "auto"),
        ("llama", "dummy"),
        ("qwen3", "auto"),
        ("gguf", "auto"),
        ("qwen3_5", "auto"),
    ],
)
def test_a_rank_that_drafts_has_the_whole_head(tmp_path, kind, load_format):
    path = WRITERS[kind](tmp_path)
    whole = load(path, load_format=load_format)
    assert whole.whole_head() is whole.head
    unit = torch.eye(SIZES["hidden_size"])
    expected = whole.head.matmul(unit, out_dtype=torch.float32)
    for rank in run_ranks(2, lambda p: load(path, parallel=p, load_format=load_format)):
        head = rank.whole_head()
        assert torch.equal(head.matmul(unit, out_dtype=torch.float32), expected)
        assert (head is rank.embedding) == whole.config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5 with experts", "qwen3_next"])
def test_shares_are_the_same_in_whatever_pieces_files_are_read(tmp_path, kind, monkeypatch):
    path = WRITERS[kind](tmp_path)
    at_once = run_ranks(2, lambda p: logits_of(load(path, parallel=p)))
    monkeypatch.setattr(sources, "CHUNK_ELEMENTS", 5 * SIZES["hidden_size"])
    assert torch.equal(run_ranks(2, lambda p: logits_of(load(path, parallel=p)))[0], at_once[0])


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_dummy_weights_are_shares_of_the_same(tmp_path, kind):
    path = WRITERS[kind](tmp_path)
    whole = logits_of(load(path, load_format="dummy"))
    ranks = run_ranks(2, lambda p: logits_of(load(path, parallel=p, load_format="dummy")))
    torch.testing.assert_close(ranks[1], whole, rtol=1e-4, atol=1e-4)


def test_biases_are_divided_with_their_rows_and_added_once(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_hidden_layers=2, max_position_embeddings=64, attention_bias=True
    )
    model = LlamaForCausalLM(config)
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):
            tensor.normal_()
    model.save_pretrained(tmp_path)
    whole = logits_of(load(tmp_path))
    ranks = run_ranks(2, lambda p: logits_of(load(tmp_path, parallel=p)))
    torch.testing.assert_close(ranks[0], whole, rtol=1e-4, atol=1e-4)


def test_a_tensor_of_another_shape_is_refused_whatever_the_share(tmp_path):
    path = change_config(write_llama(tmp_path, **SIZES), head_dim=4)
    with pytest.raises(CheckpointError, match="q_proj"):
        run_ranks(2, lambda p: load(path, parallel=p))


@pytest.mark.parametrize(
    ("name", "count"),
    [("num_heads", 6), ("num_kv_heads", 3), ("intermediate_size", 42)],
)
def test_what_does_not_divide_is_refused_by_name(tmp_path, name, count):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = read_config(write_llama(tmp_path, **SIZES | sizes))
    for num_kv_heads in (1, 2, 4, 8):
        require_divisible(replace(config, num_kv_heads=num_kv_heads), 4)
    names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    with pytest.raises(ConfigError, match=f"{names.get(name, name)}={count}"):
        require_divisible(replace(config, **{name: count}), 4)


@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [
        ("qwen3_5", "linear_num_key_heads", 1),
        ("qwen3_5", "intermediate_size", 25),
        ("qwen3_next", "moe_intermediate_size", 9),
        ("qwen3_next", "shared_expert_intermediate_size", 15),
    ],
)
def test_what_does_not_divide_a_hybrid_is_refused_by_name(tmp_path, kind, name, count):
    def config(**changes):
        return read_config(write_hybrid(tmp_path, kind, **HYBRID_SIZES | changes))

    require_divisible(config(), 2)
    with pytest.raises(ConfigError, match=f"{name}={count}"):
        require_divisible(config(**{name: count}), 2)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mamba_num_heads", 9),
        ("n_groups", 3),
        ("num_key_value_heads", 3),
        ("intermediate_size", 25),
        ("moe_intermediate_size", 9),
        ("moe_shared_expert_intermediate_size", 15),
    ],
)
def test_what_does_not_divide_nemotron_is_refused_by_name(tmp_path, name, count):
    def config(**changes):
        (tmp_path / "config.json").write_text(
            json.dumps(nemotron_config(**NEMOTRON_SIZES | {"num_attention_heads": 6} | changes))
        )
        return read_config(tmp_path)

    require_divisible(config(), 2)
    with pytest.raises(ConfigError, match=f"{name}={count}"):
        require_divisible(config(**{name: count}), 2)
    # Sizes that no layer has need not divide.
    if name == "n_groups":
        require_divisible(config(hybrid_override_pattern="*E-", n_groups=3), 2)


def test_sizes_that_no_layer_has_need_not_divide(tmp_path):
    """Of a mixture of experts the dense size; of full attention alone the linear heads."""
    changes = HYBRID_SIZES | {"intermediate_size": 25, "linear_num_key_heads": 1}
    changes |= {"layer_types": ["full_attention"] * 4}
    require_divisible(read_config(write_hybrid(tmp_path, "qwen3_next", **changes)), 2)
