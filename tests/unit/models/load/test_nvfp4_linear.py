"""NVFP4 checkpoints: what the library that wrote them means, and files that are refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import read_checkpoint, write_checkpoint
from helpers.compressed import compressed, written
from helpers.forward import CPU, TOKENS, load, logits_of
from helpers.quantized import NVFP4
from helpers.thread_ranks import run_ranks
from sametoken.bench.memory import load_shapes
from sametoken.errors import CheckpointError, ConfigError
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.nvfp4_linear import Nvfp4Linear
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.models.loader import read_config
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

GROUPS = {"group_0": {"targets": ["Linear"], "weights": NVFP4}}
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model, and the library's logits of the tokens."""
    folder = tmp_path_factory.mktemp("nvfp4")
    return folder, written(folder, GROUPS, token_ids=TOKENS, num_hidden_layers=1, vocab_size=64)


def test_logits_are_those_of_the_library_that_wrote_the_file(checkpoint):
    folder, expected = checkpoint
    for kernels in (ReferenceKernels(), NativeKernels()):
        assert torch.allclose(logits_of(load(folder, kernels)), expected, rtol=1e-4, atol=1e-4)


def test_activations_are_not_rounded_whatever_the_file_asks_for(checkpoint, tmp_path):
    """Their scale is of no use here, even if it is none, as of an expert that no row had chosen."""
    folder, _ = checkpoint
    config, tensors = read_checkpoint(folder)
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = NVFP4 | {"dynamic": "local", "observer": "static_minmax"}
    for name in [name for name in tensors if name.endswith("weight_global_scale")]:
        tensors[name.replace("weight", "input")] = torch.zeros(1)
    write_checkpoint(tmp_path, config, tensors)
    assert torch.equal(logits_of(load(tmp_path)), logits_of(load(folder)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_are_those_of_the_library_rounded_once(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 64, generator=generator) * torch.logspace(-3, 2, 40)[:, None]
    (tmp_path / "config.json").write_text("{}")
    save_file({"fc.weight": weight}, tmp_path / "model.safetensors")
    meant = compressed(tmp_path, GROUPS)["fc.weight"]
    source = open_weights(tmp_path)
    reader = WeightReader(source, ReferenceKernels(), dtype, CPU)
    found = Nvfp4Linear().expanded(reader, 64, Part("fc", 40))
    assert found.dtype == torch.float32
    # The library rounds to bf16 at last.
    assert torch.equal(found.bfloat16(), meant.bfloat16())
    assert not torch.equal(found.bfloat16().float(), found)
    packed = Nvfp4Linear().read(reader, 64, (Part("fc", 40),))
    assert torch.equal(packed.matmul(torch.eye(64, dtype=dtype)), found.to(dtype).T)


def test_ranks_divide_rows_and_whole_groups(checkpoint):
    folder, _ = checkpoint
    expected = logits_of(load(folder))
    for got in run_ranks(2, lambda rank: logits_of(load(folder, parallel=rank))):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


def copied(folder, to, **changes):
    """The checkpoint with tensors of the gate changed."""
    config, tensors = read_checkpoint(folder)
    for name, change in changes.items():
        tensors[f"{GATE}.{name}"] = change(tensors[f"{GATE}.{name}"])
    return write_checkpoint(to, config, tensors)


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("weight_packed", lambda one: one[:, 1:].contiguous(), r"has shape \[256, 63\]"),
        ("weight_packed", lambda one: one.to(torch.int32), "has dtype int32"),
        ("weight_scale", lambda one: one.float(), "has dtype float32"),
        ("weight_scale", lambda one: (one.float() * torch.nan).to(one.dtype), "holds NaN"),
        ("weight_scale", lambda one: (-one.float()).to(one.dtype), "holds negative scales"),
        ("weight_global_scale", lambda one: -one, "scales that are not positive"),
        ("weight_global_scale", lambda one: one.expand(2).clone(), r"has shape \[2\]"),
    ],
)
def test_files_that_do_not_fit_are_refused(checkpoint, tmp_path, name, change, what):
    with pytest.raises(CheckpointError, match=what):
        load(copied(checkpoint[0], tmp_path, **{name: change}))


def test_features_that_no_groups_or_ranks_divide_are_refused(checkpoint):
    reader = WeightReader(open_weights(checkpoint[0]), ReferenceKernels(), torch.float32, CPU)
    with pytest.raises(CheckpointError, match="rows of 40 features, in NVFP4 no multiple of 16"):
        Nvfp4Linear().expanded(reader, 40, Part(GATE, 256))

    def read(parallel):
        own = WeightReader(reader.source, reader.kernels, reader.dtype, CPU, parallel)
        return Nvfp4Linear().expanded(own, 48, Part(GATE, 256, split=Split.COLUMNS))

    with pytest.raises(ConfigError, match="cuts the 48 features"):
        run_ranks(2, read)


@pytest.mark.parametrize("kernels", [ReferenceKernels(), NativeKernels()])
def test_a_weight_takes_four_bits_and_a_half(checkpoint, kernels):
    folder, _ = checkpoint
    stored = load_file(folder / "model.safetensors").items()
    packed = sum(one.numel() for name, one in stored if name.endswith("weight_packed"))
    tables = sum(one.numel() for name, one in stored if name in TABLES)
    factors = 4 * sum(len(one) for name, one in stored if name.endswith("weight_packed"))
    bf16 = load(folder, kernels, dtype=torch.bfloat16).weights_bytes
    assert bf16 == 2 * packed * 9 // 16 + factors + 2 * tables
    assert bf16 == load_shapes(read_config(folder), folder, torch.bfloat16).weights_bytes
    assert load(folder, kernels, load_format="dummy").weights_bytes == bf16 + 2 * tables
