"""Targets whose lm_head is quantized: the law, heads that share it, a token_map, and updates."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.checkpoints import VOCAB, eagle1_tensors, write_eagle1
from helpers.forward import CPU
from helpers.quantized import write_with_lm_head
from helpers.updates import NGRAM, engine, said, same_weights, tensors_of
from sametoken.errors import UnsupportedError
from sametoken.models.heads.eagle import Eagle1Checkpoint
from sametoken.models.heads.reader import lm_head_of
from sametoken.models.loader import load_model
from sametoken.models.quantize import SCHEMES
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels

#: Features that groups of 32 divide.
SIZES = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
SOME = [1, 3, 4, 9, 17, 21]


@pytest.fixture(scope="module", params=SCHEMES)
def pairs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return [write_with_lm_head(folder, seed, request.param, **SIZES) for seed in (0, 1)]


def eagle(folder, **changes) -> dict:
    head = write_eagle1(folder, eagle1_tensors(**SIZES), **SIZES)
    return {"method": "eagle", "model": str(head), "num_speculative_tokens": 3} | changes


def models(llm):
    return llm._engine.weights.model, llm._engine.weights.drafter.model


def test_speculation_changes_no_bit_and_heads_share_the_weight(pairs, tmp_path):
    (plain, copy), _ = pairs
    truth = engine(copy)
    assert models(truth)[0].head.nbytes < 0.6 * models(engine(plain))[0].head.nbytes
    wanted = said(truth)
    by_lookup, by_head = engine(copy, NGRAM), engine(copy, eagle(tmp_path))
    assert said(by_lookup) == said(by_head) == wanted
    assert by_lookup.speculation_metrics.num_accepted_tokens > 0
    assert by_head.speculation_metrics.num_draft_tokens > 0
    target, head = models(by_head)
    assert head.lm_head is target.head


def test_a_model_drafts_perfectly_for_itself(pairs):
    (_, copy), _ = pairs
    spec = {"method": "draft_model", "model": str(copy), "num_speculative_tokens": 3}
    llm = engine(copy, spec)
    assert said(llm) == said(engine(copy))
    metrics = llm.speculation_metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0


def test_a_head_proposes_tokens_of_a_map_alone(pairs, tmp_path):
    (_, copy), _ = pairs
    file = tmp_path / "map.json"
    file.write_text(json.dumps(SOME))
    llm = engine(copy, eagle(tmp_path / "head", token_map=str(file)))
    assert said(llm) == said(engine(copy))
    target, head = models(llm)
    x = torch.randn(5, 32)
    expected = target.head.matmul(x)[:, SOME]
    # The rows are expanded, so activations are not rounded.
    assert (head.lm_head.matmul(x) - expected).norm() < 0.05 * expected.norm()


def test_floats_become_what_a_quantized_copy_has(pairs):
    (_, copy), (other_plain, other_copy) = pairs
    live, built = engine(copy, NGRAM), engine(other_copy)
    live.update_weights(tensors_of(other_plain).items())
    assert same_weights(live, built)
    assert said(live) == said(built)
    live.update_weights(tensors_of(copy).items())
    assert said(live) == said(engine(copy))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, under the interpreter")
@pytest.mark.parametrize("kernels", [ReferenceKernels(), TritonKernels(GemmTable())])
def test_a_map_takes_rows_in_their_bits_where_they_are_not_expanded(pairs, tmp_path, kernels):
    """As on a GPU."""
    (_, copy), _ = pairs
    how = {"kernels": kernels, "dtype": torch.float32, "device": CPU, "max_positions": 32}
    target = load_model(copy, **how)
    head = Eagle1Checkpoint(write_eagle1(tmp_path / "head", eagle1_tensors(**SIZES), **SIZES))
    assert head.load(target, **how).lm_head is target.head
    cut = head.load(target, **how, token_ids=torch.tensor(SOME)).lm_head
    assert type(cut) is type(target.head)
    assert cut.nbytes * VOCAB == target.head.nbytes * len(SOME)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(cut.matmul(x), target.head.matmul(x)[:, SOME])


def test_a_map_is_refused_where_rows_cannot_be_taken():
    kernels = ReferenceKernels()
    parts = kernels.stack([kernels.pack(torch.ones(2, 8)) for _ in range(2)])
    with pytest.raises(UnsupportedError, match="Leave token_map out"):
        lm_head_of(kernels, parts, torch.arange(2))
