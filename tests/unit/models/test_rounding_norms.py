"""Norms that round their rows for the one product that reads them: which do, and that no bit moves.

Logits are compared with those of the same model whose norms leave rounding to products.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from helpers.checkpoints import LLAMA, llama_tensors, write_checkpoint, write_llama
from helpers.families import write_family
from helpers.forward import OneRun, load
from helpers.hybrids import hybrid_config, hybrid_tensors
from helpers.quantized import (
    GROUP,
    STATIC,
    TOKEN,
    block_config,
    compressed_config,
    quantize_tensors,
)
from helpers.thread_ranks import run_ranks
from sametoken.layers.norm import RMSNorm, RoundingNorm
from sametoken.models import blocks
from sametoken.models.in_place import Replacement
from sametoken.models.quantize import quantize_checkpoint
from sametoken.ops.model.gemm import fp8_triton
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels

TOKENS = [3, 20, 17, 5, 5, 21, 0, 9, 9, 12, 2]
SIZES = {
    "vocab_size": 24,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def triton_kernels() -> TritonKernels:
    return TritonKernels(GemmTable())


def write_fp8(folder, strategy: str = "channel", activations: dict | None = TOKEN, seed: int = 0):
    config = LLAMA | SIZES
    tensors = llama_tensors(config, seed)
    fixed = [0.02, 0.02] * 7 if activations is STATIC else ()
    stored, _ = quantize_tensors(tensors, strategy, scale_name="weight_scale", input_scales=fixed)
    config |= {"quantization_config": compressed_config(strategy, activations)}
    return write_checkpoint(folder, config, stored)


def kinds_of(model) -> set[type]:
    return {kind for kinds in kinds_by_layer(model) for kind in kinds}


def kinds_by_layer(model) -> list[tuple[type, type]]:
    """Of the norms before attention, or what is in its place, and before the MLP."""
    assert type(model.final_norm) is RMSNorm
    return [(type(one.input_norm), type(one.post_attention_norm)) for one in model.layers]


@contextmanager
def without_rounding_norms():
    """Models that are loaded within have none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_norm_before", lambda block, norm: norm)
        yield


def both(path, *arguments, **options) -> tuple:
    """The model, and the same without norms that round."""
    model = load(path, *arguments, **options)
    assert kinds_of(model) == {RoundingNorm}
    with without_rounding_norms():
        plain = load(path, *arguments, **options)
    assert kinds_of(plain) == {RMSNorm}
    return model, plain


def logits_of(model, *chunks: int) -> torch.Tensor:
    return OneRun(model, max_len=16).logits(TOKENS, list(chunks))


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        (triton_kernels(), torch.float16),
        (triton_kernels(), torch.float32),
        (ReferenceKernels(), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("rounding", [("channel", TOKEN), ("block", GROUP)])
def test_no_bit_of_the_logits_moves(tmp_path, kernels, dtype, rounding):
    """Of a prompt, of single rows, and of windows of drafts after them."""
    model, plain = both(write_fp8(tmp_path, *rounding), kernels, dtype=dtype)
    expected = logits_of(plain)
    for chunks in ((), (5, 1, 1, 3)):
        assert torch.equal(logits_of(model, *chunks), expected)


def test_kept_rows_and_auxiliary_states_are_the_same(tmp_path):
    models = both(write_fp8(tmp_path), dtype=torch.bfloat16, aux_layers=(0, 1))
    for kept in (None, [2, 7]):
        got, expected = (OneRun(model, max_len=16).run(TOKENS, 0, kept=kept) for model in models)
        assert torch.equal(got.last, expected.last)
        assert torch.equal(got.auxiliary, expected.auxiliary)


@pytest.mark.parametrize("rounding", [("channel", TOKEN), ("block", GROUP)])
def test_products_behind_norms_round_nothing_themselves(tmp_path, monkeypatch, rounding):
    """Of four products of a layer two are behind no norm."""
    path, rounded, calls = write_fp8(tmp_path, *rounding), fp8_triton.rounded, []
    model = load(path, triton_kernels())
    monkeypatch.setattr(
        fp8_triton, "rounded", lambda *given: [calls.append(given), rounded(*given)][1]
    )
    OneRun(model, max_len=16).run(TOKENS[:3], 0)
    assert len(calls) == 2 * SIZES["num_hidden_layers"]


def test_nor_of_two_ranks(tmp_path):
    """Each norms whole rows, and divides features behind them alone."""
    path = write_fp8(tmp_path)

    def run(rank) -> tuple:
        model = load(path, parallel=rank, dtype=torch.bfloat16)
        return logits_of(model), kinds_of(model)

    got = run_ranks(2, run)
    with without_rounding_norms():
        expected = run_ranks(2, run)
    assert [kinds for _, kinds in (*got, *expected)] == [{RoundingNorm}] * 2 + [{RMSNorm}] * 2
    assert all(torch.equal(logits, expected[0][0]) for logits, _ in got)


def test_new_weights_in_place_are_those_of_another_load(tmp_path):
    live, loaded = (load(write_fp8(tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    expected = logits_of(loaded)
    assert not torch.equal(logits_of(live), expected)
    Replacement.of(live, loaded).write()
    assert kinds_of(live) == {RoundingNorm}
    assert torch.equal(logits_of(live), expected)


def w4a16(folder):
    plain = write_llama(folder / "plain", hidden_size=64, intermediate_size=64, head_dim=16)
    quantize_checkpoint(plain, folder / "copy", "w4a16")
    return folder / "copy"


def fp8_copy(folder, family: str, **changes):
    plain = write_family(folder / "plain", family, **changes)
    quantize_checkpoint(plain, folder / "copy", "fp8-dynamic")
    return folder / "copy"


EXPERTS_ALONE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
OTHERS = {
    "plain": write_llama,
    "static": lambda folder: write_fp8(folder, "tensor", STATIC),
    "weights alone": lambda folder: write_fp8(folder, "channel", None),
    "w4a16": w4a16,
    "factors behind blocks": lambda folder: fp8_copy(folder, "granite"),
}


def hybrid(folder):
    """In blocks except for the gates, which are parts of Gated DeltaNet's projection."""
    config = hybrid_config("qwen3_5", hidden_size=128)
    tensors = hybrid_tensors(config)
    rest = ("in_proj_a", "in_proj_b", "conv1d", "norm", "embed_tokens", "lm_head", "mtp.", "A_log")
    chosen = [
        name
        for name, one in tensors.items()
        if one.dim() == 2 and not any(part in name for part in rest)
    ]
    stored, _ = quantize_tensors(tensors, chosen=chosen.__contains__)
    return write_checkpoint(folder, config | {"quantization_config": block_config()}, stored)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (
            lambda folder: fp8_copy(folder, "qwen3_moe", **EXPERTS_ALONE),
            {(RoundingNorm, RMSNorm)},
        ),
        (lambda folder: fp8_copy(folder, "ministral3"), {(RoundingNorm, RoundingNorm)}),
        (hybrid, {(RoundingNorm, RoundingNorm), (RMSNorm, RoundingNorm)}),
    ],
)
@pytest.mark.parametrize("kernels", [triton_kernels(), ReferenceKernels()])
def test_a_norm_that_another_reads_too_does_not_round(tmp_path, write, expected, kernels):
    """Experts' routers read it in full, and Gated DeltaNet's gates; no bit of the logits moves."""
    path, dtype = write(tmp_path), torch.float32
    model = load(path, kernels, dtype=dtype)
    assert {*kinds_by_layer(model)} == expected
    with without_rounding_norms():
        plain = load(path, kernels, dtype=dtype)
    assert kinds_of(plain) == {RMSNorm}
    for chunks in ((), (5, 1, 1, 3)):
        assert torch.equal(logits_of(model, *chunks), logits_of(plain, *chunks))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_keep_their_norms(tmp_path, kind):
    path = OTHERS[kind](tmp_path)
    for kernels in (triton_kernels(), ReferenceKernels()):
        assert kinds_of(load(path, kernels)) == {RMSNorm}


def test_c_kernels_round_in_their_products(tmp_path):
    assert kinds_of(load(write_fp8(tmp_path), NativeKernels())) == {RMSNorm}
