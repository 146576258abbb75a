"""Draft heads that compressed-tensors wrote: the same tokens, and the drafts of what they mean."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import (
    LLAMA,
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_eagle1_speculators,
    write_llama,
    write_safeailab,
    write_speculators,
)
from helpers.compressed import FLOAT, compressed
from helpers.harness import Ran, requests_of, run
from helpers.heads import OPTIONS, SharedTarget
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.models.heads.eagle import Eagle1Checkpoint
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.model.gemm.int4 import Int4Weight
from sametoken.ops.reference import PlainWeight

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
LAYER = {key: value for key, value in LLAMA.items() if key != "architectures"} | SIZES
FP8 = {"weights": FLOAT | {"strategy": "channel"}}
ROUNDED = FP8 | {"input_activations": FLOAT | {"strategy": "token", "dynamic": True}}
INT4 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
FIXED = {"num_speculative_tokens": 3, "draft_limits": "fixed"}
PROMPTS = [[1, 2, 3, 4] * 5, [0, 7, 7], list(range(17)), [5, 6]]


def eagle1(folder):
    return write_eagle1(folder, eagle1_tensors(own=True, **SIZES), **SIZES)


def eagle1_speculators(folder):
    return write_eagle1_speculators(folder, eagle1_tensors(**SIZES), transformer_layer_config=LAYER)


def eagle3(folder):
    return write_safeailab(folder, head_tensors(**SIZES), **SIZES)


def eagle3_speculators(folder):
    return write_speculators(folder, head_tensors(**SIZES), SIZES)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("target"), **SIZES)


def said(target, head=None) -> Ran:
    """By the target alone, or with a head's drafts; the method is told by the head's files."""
    core = build_engine(
        EngineConfig.from_options(
            model=str(target),
            speculative_config=head and FIXED | {"model": str(head)},
            device="cpu",
            dtype="float32",
            block_size=4,
            num_kv_blocks=80,
            max_model_len=60,
        )
    )
    return run(core, requests_of(PROMPTS, 30, 0.0, 0.7))


@pytest.fixture(scope="module")
def truth(target) -> dict:
    """What the target says alone."""
    return said(target).tokens


@pytest.mark.parametrize(
    ("write", "scheme"),
    [(eagle1, FP8), (eagle1_speculators, INT4), (eagle3, INT4), (eagle3_speculators, FP8)],
)
def test_a_quantized_head_drafts_what_it_means(tmp_path, target, truth, write, scheme):
    """Nothing of these schemes rounds activations, so expanded matrices have the same products."""
    head, plain = write(tmp_path / "head"), write(tmp_path / "plain")
    meant = compressed(head, {"group_0": scheme | {"targets": ["Linear"]}})
    save_file(meant, plain / "model.safetensors")
    expanded, quantized = said(target, plain), said(target, head)
    assert quantized.tokens == expanded.tokens == truth
    assert (quantized.accepted, quantized.offered) == (expanded.accepted, expanded.offered)
    assert 0 < quantized.accepted < quantized.offered


def test_a_head_whose_activations_are_rounded_changes_no_token(tmp_path, target, truth):
    head = eagle3(tmp_path)
    compressed(head, {"group_0": ROUNDED | {"targets": ["Linear"]}})
    quantized = said(target, head)
    assert quantized.tokens == truth
    assert 0 < quantized.accepted < quantized.offered


def test_targets_are_named_as_the_head_s_file_names_its_modules(tmp_path):
    head = eagle3(tmp_path)
    groups = {
        "group_0": FP8 | {"targets": ["re:midlayer.self_attn.*"]},
        "group_1": INT4 | {"targets": ["re:midlayer.mlp.*"]},
    }
    compressed(head, groups)
    loaded = Eagle3Checkpoint(head).load(SharedTarget(64), **OPTIONS)
    assert isinstance(loaded.layer.attention.qkv.weight, Fp8Weight)
    assert isinstance(loaded.layer.mlp.down.weight, Int4Weight)
    assert isinstance(loaded.fc.weight, PlainWeight)
    assert isinstance(loaded.lm_head, PlainWeight)


def test_the_target_s_lm_head_serves_a_quantized_head_and_a_token_map_cuts_it(tmp_path):
    head = eagle1_speculators(tmp_path / "shared")
    compressed(head, {"group_0": FP8 | {"targets": ["Linear"]}})
    token_ids = torch.tensor([1, 5, 9])
    loaded = Eagle1Checkpoint(head).load(SharedTarget(64), token_ids=token_ids, **OPTIONS)
    assert loaded.lm_head.out_features == 3
    head = eagle1(tmp_path / "own")
    compressed(head, {"group_0": FP8 | {"targets": ["Linear"]}})
    own, cut = (
        Eagle1Checkpoint(head).load(SharedTarget(64), token_ids=ids, **OPTIONS).lm_head
        for ids in (None, token_ids)
    )
    assert isinstance(own, Fp8Weight)
    x = torch.randn(2, 64)
    torch.testing.assert_close(cut.matmul(x), own.matmul(x)[:, token_ids])
