"""The kernels under gradients: those of a GPU in the interpreter, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5TextConfig

from helpers.exact import HYBRID, all_equal, write_exact
from helpers.families import SIZES, fixed_config, random_model
from sametoken.errors import UnsupportedError
from sametoken.exact import ExactModel, model
from sametoken.exact.kernels import differentiable
from sametoken.exact.packed import PackedSequences
from sametoken.models.load.weights import WeightReader
from sametoken.models.loader import open_checkpoint
from sametoken.models.registry import model_class
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels
from sametoken.sampling.logprobs import log_probabilities
from sametoken.state.caches import ModelCache

SEQUENCES = [[1, 2, 3, 4, 5], [7, 8]]
ONE_LAYER = {"num_hidden_layers": 1}


def random_checkpoint(path, config):
    random_model(config, 0).save_pretrained(path)
    return path


def on_both(path, monkeypatch):
    """A model on this machine's kernels and on a GPU's, with gradients, and their outputs."""
    plain = ExactModel(str(path), dtype="float32", device="cpu")
    wanted = plain(SEQUENCES)
    torch.cat(wanted).sum().backward()
    kernels = TritonKernels(GemmTable())
    monkeypatch.setattr(model, "select_kernels", lambda device: kernels)
    exact = ExactModel(str(path), dtype="float32", device="cpu")
    found = exact(SEQUENCES)
    torch.cat(found).sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not all_equal(found, wanted)
    assert torch.equal(exact(SEQUENCES[1:])[0], found[1])
    return zip(exact.parameters(), plain.parameters(), strict=True)


def test_a_gpus_kernels_take_gradients_too(tmp_path, monkeypatch):
    """The interpreter runs them in fp32; packed rows have the bits of single sequences."""
    for ours, theirs in on_both(write_exact(tmp_path, "qwen3"), monkeypatch):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_and_those_of_recurrent_layers(tmp_path, monkeypatch):
    one = SIZES | HYBRID | ONE_LAYER | {"layer_types": ["linear_attention"]}
    path = random_checkpoint(tmp_path, Qwen3_5TextConfig(**one))
    for ours, theirs in on_both(path, monkeypatch):
        assert (ours.grad - theirs.grad).norm() < 1e-4 * theirs.grad.norm()


def test_and_those_of_experts(tmp_path, monkeypatch):
    """Forward, they are the engine's own to the bit."""
    path = random_checkpoint(tmp_path, fixed_config("qwen3_moe", **ONE_LAYER, mlp_only_layers=[]))
    for ours, theirs in on_both(path, monkeypatch):
        # A CPU gives none to an expert that nobody chose.
        wanted = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(ours.grad, wanted, rtol=1e-4, atol=1e-4)
    found = ExactModel(str(path), dtype="float32", device="cpu")(SEQUENCES)
    engines = [by_the_engines_decoder(path, ids) for ids in SEQUENCES]
    assert all_equal(found, engines)


def by_the_engines_decoder(path, ids) -> torch.Tensor:
    """Log-probabilities of a sequence after its first token, by a GPU's kernels."""
    checkpoint, device = open_checkpoint(path), torch.device("cpu")
    reader = WeightReader(
        checkpoint.open_tensors(), TritonKernels(GemmTable()), torch.float32, device
    )
    build = model_class(checkpoint.config.architecture)
    decoder = build(checkpoint.config, reader, max_positions=100)
    packed = PackedSequences.of([ids], [1], 16, device)
    cache = ModelCache.allocate(
        decoder.caches, num_blocks=1, block_size=16, max_num_seqs=1, num_drafts=0, device=device
    )
    hidden = decoder.forward(packed.token_ids, packed.rows, cache).last
    logprobs = log_probabilities(decoder.compute_logits(hidden[:-1].contiguous()))
    return logprobs.gather(1, packed.chosen[:, None]).squeeze(1)


def test_what_has_no_gradients_is_refused_by_name():
    kernels = differentiable(ReferenceKernels())
    with pytest.raises(UnsupportedError, match="clamped_swiglu has no gradients"):
        kernels.clamped_swiglu(torch.ones(1, 4), 1.0, 1.0)
    with pytest.raises(UnsupportedError, match="no gradients"):
        kernels.pack(torch.ones(4, 4)).quantize_fp8()
