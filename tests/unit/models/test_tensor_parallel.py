"""A model divided among ranks: shares of the same weights, and nearly the same states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.checkpoints import write_llama
from helpers.gguf_files import convert
from helpers.hybrids import hybrid_config, hybrid_tensors, write_checkpoint
from helpers.thread_ranks import run_ranks
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.kernels.interface import AttentionRows
from sametoken.kernels.native.bundle import NativeKernels
from sametoken.kernels.reference import ReferenceKernels
from sametoken.layers.parallel import ALONE
from sametoken.models.loader import load_model, read_config
from sametoken.models.tensor_parallel import require_divisible
from sametoken.state.kv_cache import KVCache

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TOKENS = torch.tensor([3, 40, 17, 5, 5, 21, 0])


def load(path, parallel=ALONE, dtype=torch.float32, kernels=None, **options):
    return load_model(
        path,
        kernels=kernels or ReferenceKernels(),
        dtype=dtype,
        device=CPU,
        max_positions=32,
        parallel=parallel,
        **options,
    )


def logits_of(model, first: int = 0, kv=None):
    """Logits of the tokens from ``first`` on, all in one slot."""
    kv = kv or KVCache.allocate(model.kv_spec, num_blocks=2, block_size=8, device=CPU)
    positions = torch.arange(first, len(TOKENS))
    rows = AttentionRows(positions, positions * 0, positions, torch.tensor([[0, 1], [1, 1]]))
    return model.compute_logits(model.forward(TOKENS[first:], rows, kv).last), kv


def write_qwen3(folder):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, num_hidden_layers=2, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def write_gguf(folder):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=2, max_position_embeddings=64)
    return convert(LlamaForCausalLM(config), folder / "model.gguf")


WRITERS = {
    "llama": lambda folder: write_llama(folder, **SIZES),
    "qwen3": write_qwen3,
    "gguf": write_gguf,
}


@pytest.mark.parametrize("bundle", [ReferenceKernels, NativeKernels])
@pytest.mark.parametrize("kind", WRITERS)
def test_ranks_agree_and_are_near_one_rank(tmp_path, kind, bundle):
    path = WRITERS[kind](tmp_path)
    kernels = bundle()
    whole, _ = logits_of(load(path, kernels=kernels))
    first, second = run_ranks(2, lambda p: logits_of(load(path, p, kernels=kernels))[0])
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4)


def test_a_row_s_bits_do_not_depend_on_its_company(tmp_path):
    path = write_llama(tmp_path, **SIZES)

    def run(parallel):
        model = load(path, parallel, torch.bfloat16)
        together, kv = logits_of(model)
        alone = [logits_of(model, first, kv)[0][0] for first in range(len(TOKENS))]
        return torch.equal(torch.stack(alone), together)

    assert run_ranks(2, run) == [True, True]


def test_ranks_hold_shares_and_not_the_whole(tmp_path):
    path = write_llama(tmp_path, **SIZES)
    whole = load(path)
    ranks = run_ranks(2, lambda p: load(path, p))
    assert [rank.kv_spec.num_kv_heads for rank in ranks] == [1, 1]
    # The embedding is whole on every rank.
    divided = sum(rank.weights_bytes for rank in ranks) - 2 * whole.embedding.nbytes
    assert divided == whole.weights_bytes - whole.embedding.nbytes
    assert [rank.head.out_features for rank in ranks] == [24, 24]


def test_dummy_weights_are_shares_of_the_same(tmp_path):
    path = write_llama(tmp_path, **SIZES)
    whole, _ = logits_of(load(path, load_format="dummy"))
    ranks = run_ranks(2, lambda p: logits_of(load(path, p, load_format="dummy"))[0])
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
    whole, _ = logits_of(load(tmp_path))
    ranks = run_ranks(2, lambda p: logits_of(load(tmp_path, p))[0])
    torch.testing.assert_close(ranks[0], whole, rtol=1e-4, atol=1e-4)


def test_a_tensor_of_another_shape_is_refused_whatever_the_share(tmp_path):
    path = write_llama(tmp_path, **SIZES)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"head_dim": 8', '"head_dim": 4'))
    with pytest.raises(CheckpointError, match="q_proj"):
        run_ranks(2, lambda p: load(path, p))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("num_heads", 6),
        ("num_kv_heads", 2),
        ("intermediate_size", 42),
        ("vocab_size", 40),
    ],
)
def test_what_does_not_divide_is_refused_by_name(tmp_path, name, count):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64}
    config = read_config(write_llama(tmp_path, **SIZES | sizes))
    require_divisible(config, 4)
    names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    with pytest.raises(ConfigError, match=f"{names.get(name, name)}={count}"):
        require_divisible(replace(config, **{name: count}), 4)


def test_hybrids_are_refused_by_name(tmp_path):
    config = hybrid_config("qwen3_5")
    write_checkpoint(tmp_path, config, hybrid_tensors(config))
    with pytest.raises(UnsupportedError, match=r"tensor_parallel_size=2 with Qwen3_5"):
        require_divisible(read_config(tmp_path), 2)
