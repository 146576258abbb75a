"""Ranks' shares of GGUF matrices that stay in their blocks: rows, and whole blocks of rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from helpers import forward
from helpers.forward import CPU, Bench
from helpers.gguf_families import write_family_gguf
from helpers.gguf_files import write_gguf
from helpers.thread_ranks import run_ranks
from sametoken.errors import ConfigError
from sametoken.models.load.gguf_blocks import BlockFormat
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
ROWS, FEATURES = 24, 512


class Blocks:
    """A source of one matrix of random blocks, ten rows at a time."""

    location = "blocks"

    def __init__(self, kind: GGMLQuantizationType) -> None:
        elements, size = GGML_QUANT_SIZES[kind]
        shape = (ROWS, FEATURES // elements, size)
        raw = np.random.default_rng(0).integers(0, 60, shape, np.uint8).reshape(ROWS, -1)
        self.raw, self.values = torch.from_numpy(raw), torch.from_numpy(dequantize(raw, kind))

    def names(self):
        return {"fc.weight"}

    def shape(self, name):
        return ROWS, FEATURES

    def stored_chunks(self, name):
        yield from self.raw.split(10)


def read(source, kind, size=1, rank=0, **changes) -> torch.Tensor:
    parallel = SimpleNamespace(size=size, rank=rank)
    reader = WeightReader(source, ReferenceKernels(), torch.float32, CPU, parallel)
    part = Part("fc", ROWS, **changes)
    return BlockFormat(kind).read(reader, FEATURES, (part,)).rows(torch.arange(ROWS // size))


@pytest.mark.parametrize("name", TYPES)
def test_a_rank_has_its_rows_or_its_whole_blocks(name):
    kind = GGMLQuantizationType[name]
    source = Blocks(kind)
    places = torch.randperm(ROWS // 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(read(source, kind), source.values)
    for rank in (0, 1):
        rows = source.values.chunk(2)[rank]
        assert torch.equal(read(source, kind, 2, rank, split=Split.ROWS), rows)
        # Of two ranges of rows, e.g. gates and ups, each is divided.
        ranges = [run.chunk(2)[rank] for run in source.values.split((16, 8))]
        got = read(source, kind, 2, rank, split=Split.ROWS, output_sizes=(16, 8))
        assert torch.equal(got, torch.cat(ranges))
        got = read(source, kind, 2, rank, split=Split.ROWS, permutation=places)
        assert torch.equal(got[places], rows)


@pytest.mark.parametrize("name", TYPES)
def test_columns_are_cut_between_blocks(name):
    kind = GGMLQuantizationType[name]
    source = Blocks(kind)
    for rank in (0, 1):
        parallel = SimpleNamespace(size=2, rank=rank)
        reader = WeightReader(source, ReferenceKernels(), torch.float32, CPU, parallel)
        weight = BlockFormat(kind).read(reader, FEATURES, (Part("fc", ROWS, split=Split.COLUMNS),))
        assert torch.equal(weight.rows(torch.arange(ROWS)), source.values.chunk(2, 1)[rank])
    many = SimpleNamespace(size=FEATURES // GGML_QUANT_SIZES[kind][0] * 2, rank=0)
    reader = WeightReader(source, ReferenceKernels(), torch.float32, CPU, many)
    with pytest.raises(ConfigError, match=f"cuts the 512 features of fc within .* of {name}"):
        BlockFormat(kind).read(reader, FEATURES, (Part("fc", ROWS, split=Split.COLUMNS),))


@pytest.mark.parametrize(
    ("name", "family", "tied"), [("Q4_1", "llama", True), ("Q8_0", "qwen3", False)]
)
def test_ranks_share_a_model_in_its_bits(tmp_path, name, family, tied):
    """Half of every matrix but the embedding is on each, and together they say the same."""
    sizes = {"intermediate_size": 128, "vocab_size": 64}
    path = write_gguf(tmp_path / "model.gguf", name, family, tied, **sizes)

    def load(kernels, **options):
        return forward.load(path, kernels, load_format="gguf-packed", **options)

    def logits_of(model):
        return Bench(model, max_len=16).logits([3, 1, 4, 1, 5, 9], [3])

    def bytes_of(model):
        return sum(layer.nbytes for layer in model.layers), model.head.nbytes

    whole, ids = load(NativeKernels()), torch.arange(64)
    for rank in run_ranks(2, lambda rank: load(NativeKernels(), parallel=rank)):
        assert rank.embedding.nbytes == whole.embedding.nbytes
        assert [2 * size for size in bytes_of(rank)] == list(bytes_of(whole))
        assert torch.equal(rank.whole_head().rows(ids), whole.head.rows(ids))
    expected = logits_of(load(ReferenceKernels()))
    for got in run_ranks(2, lambda rank: logits_of(load(ReferenceKernels(), parallel=rank))):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


OTHERS = ["qwen3moe", "gpt-oss", "deepseek2", "gemma4", "qwen3next"]
OF_MAMBA_2 = ["granitehybrid", "granitehybrid-bamba", "falcon-h1", "nemotron_h_moe"]


@pytest.mark.parametrize("arch", OTHERS + OF_MAMBA_2)
def test_a_rank_of_a_family_s_file_has_the_bits_of_the_checkpoint_s(tmp_path, arch):
    paths = write_family_gguf(tmp_path / "model", arch)

    def logits_of(rank):
        models = (forward.load(path, ReferenceKernels(), parallel=rank) for path in paths)
        return [Bench(model, max_len=16).logits([3, 1, 4, 1, 5, 9], [3]) for model in models]

    assert all(torch.equal(*each) for each in run_ranks(2, logits_of))
