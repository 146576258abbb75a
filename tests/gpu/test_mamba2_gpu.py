"""Nemotron-H on a GPU: bits of its norms, activation and experts, and the law end to end."""

from __future__ import annotations

import functools

import pytest
import torch
from gpu_files import LONG_NGRAMS, requests
from recorded_gpu import answer

from helpers.checkpoints import write_checkpoint
from helpers.experts import require_experts
from helpers.fast_passes import require_law
from helpers.nemotron import nemotron_config, nemotron_tensors
from sametoken.ops.backend import Routing
from sametoken.ops.model import activation, activation_triton, norm_rope, norm_triton
from sametoken.ops.model.mamba2 import triton
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_triton import StackedExperts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_TOKENS = 64
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_activation_and_experts_are_the_references_in_any_company(dtype):
    """At Nano's widths of a group and of an expert."""
    width, groups, hidden, inner, count = 4096, 8, 256, 232, 16
    x, gate = random(0, 300, width, dtype=dtype), random(1, 300, 2 * width, dtype=dtype)
    gate, weight = gate[:, width:], random(2, width, dtype=dtype)
    normed = norm_triton.gated_group_norm(x, gate, weight, groups, 1e-5)
    wanted = norm_rope.gated_group_norm(x.cpu(), gate.cpu(), weight.cpu(), groups, 1e-5)
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
        again = norm_triton.gated_group_norm(x[:rows].clone(), gate[:rows], weight, groups, 1e-5)
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
