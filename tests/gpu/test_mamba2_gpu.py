"""Mamba-2 on a GPU at the real head shape: kernels' bits, and Nemotron-H's law end to end.

64 heads of 64 in 8 groups over a state of 128, as Nemotron-3-Nano has them. The reference of
every kernel is its plain PyTorch form.
"""

from __future__ import annotations

import functools

import pytest
import torch
from gpu_files import LONG_NGRAMS, requests
from recorded_gpu import answer

from helpers.checkpoints import write_checkpoint
from helpers.experts import require_experts
from helpers.fast_passes import require_chunks, require_law
from helpers.nemotron import nemotron_config, nemotron_tensors
from helpers.recurrent_driver import NUM_TOKENS, RecurrentDriver
from sametoken.ops.backend import Routing
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model import activation, activation_triton, norm_rope, norm_triton
from sametoken.ops.model.mamba2 import triton
from sametoken.ops.model.mamba2.rule import Mamba2, Mamba2Params
from sametoken.ops.model.mamba2.triton import ScanTile
from sametoken.ops.model.moe_triton import ExpertStack, StackedExperts
from sametoken.ops.model.recurrent.rule import STATE_STRIDE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULE = Mamba2(num_heads=64, head_dim=64, num_groups=8, state_dim=128, conv_kernel=4)
DTYPE, MAX_TOKENS = torch.bfloat16, 64
NANO = {
    "vocab_size": 1500,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}


# Kernels


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def params() -> Mamba2Params:
    heads, channels = RULE.num_heads, RULE.conv_channels
    weight = random(0, RULE.conv_kernel, channels, dtype=DTYPE)
    bias = random(1, channels, dtype=DTYPE)
    # A slow decay: what was folded once is seen for long.
    gates = random(2, heads) - 3, random(3, heads), random(4, heads)
    return Mamba2Params(RULE, *gates, weight, bias)


@functools.cache
def projections() -> torch.Tensor:
    """[z | x | B | C | dt] of every token."""
    return random(5, NUM_TOKENS, RULE.out_features + RULE.conv_channels + RULE.num_heads).to(DTYPE)


def raw_rows(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    widths = (RULE.out_features, RULE.conv_channels, RULE.num_heads)
    _, mixed, dt = projections()[tokens].split(widths, dim=-1)
    return mixed, dt


@functools.cache
def driver() -> RecurrentDriver:
    return RecurrentDriver(Recurrent(RULE, DTYPE), (params(),), raw_rows, DEVICE)


@pytest.fixture(scope="module")
def sequence():
    return driver().sequence()


def test_rows_are_those_of_the_reference(sequence):
    driver().require_near_the_reference(sequence, atol=2e-2, states_atol=1e-3)


@pytest.mark.parametrize("chunk", [3, 64, 128])
@pytest.mark.parametrize("padded", [False, True])
def test_chunks_have_the_bits_of_single_rows(sequence, chunk, padded):
    driver().require_chunks(sequence, chunk, padded=padded)


@pytest.mark.parametrize(("batch", "k"), [(1, 1), (1, 64), (8, 5), (64, 3), (8, 16)])
def test_windows_have_the_bits_of_single_rows(sequence, batch, k):
    driver().require_windows(sequence, batch, k)


def test_ragged_runs_have_the_bits_of_single_rows(sequence):
    driver().require_ragged_runs(sequence)


def test_long_runs_have_the_bits_of_single_rows():
    driver().require_long_runs(driver().sequence(300))


def test_a_captured_pass_has_the_bits_of_an_eager_one(sequence):
    driver().require_captured(sequence)


@pytest.mark.parametrize("stride", [1, STATE_STRIDE])
def test_prompts_by_chunks_are_near_the_reference_and_have_their_bits_in_every_pass(stride):
    require_chunks(Recurrent(RULE, DTYPE), stride)


TILES = [
    ScanTile(64, 4, 1),
    ScanTile(64, 4, 2),
    ScanTile(32, 2, 2),
    ScanTile(32, 4, 4),
    ScanTile(16, 4, 1),
    ScanTile(16, 2, 4),
    ScanTile(8, 2, 8),
]


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_has_the_bits_of_the_engines(sequence, tile, monkeypatch):
    monkeypatch.setattr(triton, "advance", functools.partial(triton.advance, tile=tile))
    driver().require_chunks(sequence, 64, padded=True)
    driver().require_windows(sequence, 8, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_activation_and_experts_are_the_references_in_any_company(dtype):
    """At Nano's widths of a group and of an expert."""
    width, hidden, inner, count = RULE.out_features, 256, 232, 16
    x, gate = random(0, 300, width, dtype=dtype), random(1, 300, 2 * width, dtype=dtype)
    gate, weight = gate[:, width:], random(2, width, dtype=dtype)
    normed = norm_triton.gated_group_norm(x, gate, weight, RULE.num_groups, 1e-5)
    wanted = norm_rope.gated_group_norm(x.cpu(), gate.cpu(), weight.cpu(), RULE.num_groups, 1e-5)
    torch.testing.assert_close(normed.cpu(), wanted, rtol=2e-2, atol=1e-3)
    squared = activation_triton.relu_squared(x)
    torch.testing.assert_close(squared.cpu(), activation.relu_squared(x.cpu()), rtol=0, atol=0)

    up = random(3, count, inner, hidden, dtype=dtype) / hidden**0.5
    down = random(4, count, hidden, inner, dtype=dtype) / inner**0.5
    stacked = StackedExperts(ExpertStack(up), ExpertStack(down))
    y = random(5, 300, hidden, dtype=dtype)
    routing = Routing(4, True, "sigmoid", scale=2.5)
    logits, correction = random(6, 300, count), random(7, count)
    require_experts(stacked, y, logits, routing, correction, atol=2e-2)
    for rows in (1, 2, 17, 64, 256, 257):
        again = norm_triton.gated_group_norm(
            x[:rows].clone(), gate[:rows], weight, RULE.num_groups, 1e-5
        )
        assert torch.equal(again, normed[:rows])
        assert torch.equal(activation_triton.relu_squared(x[:rows].clone()), squared[:rows])


# Engines


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("nemotron"), NANO)


def write_target(folder, sizes: dict, pattern: str = "MEM*EM-E"):
    """In bf16 and of slow decay; the correction stays in fp32, as published."""
    config = nemotron_config(pattern, **sizes)
    tensors = nemotron_tensors(config)
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensors[name] = tensor - 3
        elif not name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.bfloat16()
    return write_checkpoint(folder, config, tensors)


MTP = {"method": "mtp", "num_speculative_tokens": 5}
SPECULATION = {"plain": None, "ngram": LONG_NGRAMS, "mtp": MTP}


def generate(target, method: str, items, **options):
    return answer(target, items, speculative_config=SPECULATION[method], **options)


@pytest.fixture(scope="module")
def truth(target):
    """Every request alone in its batch, plainly, without graphs."""
    items = list(requests(16, MAX_TOKENS))
    return generate(target, "plain", items, max_num_seqs=1, enforce_eager=True).tokens


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("method", "max_num_seqs"), [("plain", 16), ("ngram", 5), ("mtp", 1), ("mtp", 16)]
)
def test_the_same_tokens(target, truth, method, max_num_seqs, eager):
    items = list(requests(6 if max_num_seqs == 1 else 16, MAX_TOKENS))
    ran = generate(target, method, items, max_num_seqs=max_num_seqs, enforce_eager=eager)
    assert ran.tokens == {name: truth[name] for name in ran.tokens}
    assert method == "plain" or ran.offered > 0


@pytest.mark.parametrize("method", ["plain", "ngram", "mtp"])
def test_the_same_tokens_of_prompts_by_chunks(target, method, monkeypatch):
    items, answers = list(requests(16, MAX_TOKENS)), functools.partial(generate, target)
    require_law(monkeypatch, triton, answers, method, items)
