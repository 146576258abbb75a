"""Matrices of GGUF files in the bits of their blocks, against the gguf package."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from helpers import forward
from helpers.forward import Bench, OneRun
from helpers.gguf_families import write_family_gguf
from helpers.gguf_files import write_gguf
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.layers.norm import RMSNorm
from sametoken.models.heads.own_module import open_module
from sametoken.models.load.gguf_blocks import _UNPACKED
from sametoken.models.load.gguf_file import read_gguf
from sametoken.ops.model.gemm.int4 import expanded
from sametoken.ops.model.gemm.int4_triton import Int4DeviceWeight
from sametoken.ops.model.gemm.integers import product
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.native.weights import QuantizedWeight
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels
from sametoken.ops.weight import IntegerMatrix

TYPES = {"Q4_0": 4.5, "Q4_1": 5, "Q8_0": 8.5, "Q4_K": 6, "Q5_K": 10, "Q6_K": 10}
#: On a GPU.
DEVICE_TYPES = {"Q4_0": 5, "Q4_1": 6, "Q8_0": 9, "Q4_K": 6, "Q5_K": 8, "Q6_K": 8}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
native = NativeKernels()
TRITON = TritonKernels(GemmTable())


def random_blocks(name: str, rows: int = 64, features: int = 512):
    """Bytes of a matrix, its integers, and the values that the gguf package reads."""
    kind = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[kind]
    # Below 60, a top byte of an fp16 scale is neither infinite nor NaN.
    raw = np.random.default_rng(0).integers(0, 256, (rows, features // elements, size), np.uint8)
    halves = {"Q4_1": (1, 3), "Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,)}.get(name, (1,))
    raw[:, :, halves] %= 60
    values = dequantize(raw.reshape(rows, -1), kind)
    return _UNPACKED[kind](torch.from_numpy(raw)), torch.from_numpy(values)


@pytest.mark.parametrize("name", TYPES)
def test_blocks_are_read_as_the_gguf_package_reads_them(name):
    matrix, values = random_blocks(name)
    assert values.unique().numel() > 1000
    assert torch.equal(expanded(matrix), values)
    assert int(matrix.codes.max()) < 2**matrix.bits


@pytest.mark.parametrize("name", TYPES)
def test_the_c_kernels_multiply_what_the_blocks_say(name):
    """One-hot activations lose nothing when they are rounded."""
    matrix, values = random_blocks(name)
    weight = native.pack_integers(matrix, torch.float32)
    found = weight.matmul(torch.eye(512))
    largest = values.abs().max()
    torch.testing.assert_close(found.T, values, rtol=1e-6, atol=float(largest) * 1e-6)
    ids = torch.tensor([5, 63, 0, 5])
    assert torch.equal(weight.rows(ids), values[ids])
    as_bf16 = native.pack_integers(matrix, torch.bfloat16).rows(ids)
    assert torch.equal(as_bf16, values[ids].bfloat16())


@pytest.mark.parametrize("name", TYPES)
def test_a_weight_takes_the_bits_that_the_module_promises(name):
    matrix, _ = random_blocks(name)
    assert native.pack_integers(matrix, torch.bfloat16).nbytes == 64 * 512 * TYPES[name] / 8


@pytest.mark.parametrize("name", TYPES)
def test_a_gpu_s_threads_make_the_elements_that_the_gguf_package_reads(name):
    """numpy has no bf16: fp16 stands in."""
    matrix, values = random_blocks(name, 40, 256)
    weight = Int4DeviceWeight.of(matrix, dtype=torch.float16)
    assert weight.nbytes == 40 * 256 * DEVICE_TYPES[name] / 8
    halves = values.half()
    assert torch.equal(weight.panels.expanded(torch.float32), values)
    assert torch.equal(weight.panels.expanded(torch.float16), halves)
    # One-hot rows: the sum of one element.
    x = torch.eye(256, dtype=torch.float16)[-60:].contiguous()
    assert torch.equal(weight.matmul(x, out_dtype=torch.float32), halves.T[-60:].float())
    ids = torch.tensor([5, 39, 0, 5])
    assert torch.equal(weight.rows(ids), halves[ids])


@dataclass(frozen=True)
class ReferenceWeight(QuantizedWeight):
    """A weight whose products are the reference's."""

    matrix: IntegerMatrix | None = None

    def matmul(self, x, bias=None, out_dtype=None):
        out = product(x, self.matrix)
        return (out if bias is None else out + bias).to(out_dtype or x.dtype)


class ReferenceProducts(NativeKernels):
    """The C kernels, except for products of integers."""

    def pack_integers(self, matrix, dtype):
        own = super().pack_integers(matrix, dtype)
        kept = {one.name: getattr(own, one.name) for one in fields(own)}
        return ReferenceWeight(**kept, matrix=matrix)


def load(path, load_format: str, kernels=native, **options):
    return forward.load(path, kernels, load_format=load_format, **options)


@pytest.mark.parametrize(
    ("name", "family", "tied"),
    [("Q4_1", "llama", True), ("Q8_0", "llama", False), ("Q4_0", "qwen3", True)],
)
def test_a_model_in_its_bits_has_the_logits_of_the_reference_s_products(
    tmp_path, name, family, tied
):
    path = write_gguf(tmp_path / "model.gguf", name, family, tied)
    kept, plain = load(path, "gguf-packed"), load(path, "gguf")
    assert isinstance(kept.embedding, QuantizedWeight)
    assert isinstance(kept.head, QuantizedWeight)
    assert (kept.head is kept.embedding) == tied
    assert kept.weights_bytes < 0.35 * plain.weights_bytes
    models = kept, load(path, "gguf-packed", ReferenceProducts()), plain
    found, wanted, without_rounding = (Bench(model).logits(PROMPT, [3]) for model in models)
    assert torch.equal(found, wanted)
    assert 0 < (found - without_rounding).norm() < 0.03 * without_rounding.norm()
    expanded_again = Bench(load(path, "gguf-packed", ReferenceKernels())).logits(PROMPT, [3])
    assert torch.equal(
        expanded_again, Bench(load(path, "gguf", ReferenceKernels())).logits(PROMPT, [3])
    )


#: Sizes that whole blocks divide.
EXPERTS = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}


def write_experts(tmp_path, arch, name):
    tensor_type = GGMLQuantizationType[name]
    return write_family_gguf(tmp_path / "model", arch, changes=EXPERTS, tensor_type=tensor_type)[1]


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_experts_in_their_bits_have_the_logits_of_the_reference_s_products(tmp_path, name):
    path = write_experts(tmp_path, "qwen3moe", name)
    kept, plain = load(path, "gguf-packed"), load(path, "gguf")
    assert kept.weights_bytes < 0.35 * plain.weights_bytes
    wanted = Bench(load(path, "gguf-packed", ReferenceProducts())).logits(PROMPT, [3])
    assert torch.equal(Bench(kept).logits(PROMPT, [3]), wanted)
    models = (load(path, each, ReferenceKernels()) for each in ("gguf-packed", "gguf"))
    assert torch.equal(*(Bench(model).logits(PROMPT, [3]) for model in models))


def require_own_bits(path) -> None:
    """A file whose blocks are kept has the logits of the expanded ones, in half the memory."""
    kept, plain = (load(path, one, ReferenceKernels()) for one in ("gguf-packed", "gguf"))
    assert torch.equal(*(Bench(model).logits(PROMPT, [3]) for model in (kept, plain)))
    native_bytes = [load(path, one).weights_bytes for one in ("gguf-packed", "gguf")]
    assert native_bytes[0] < 0.55 * native_bytes[1]


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_heads_of_values_by_turns_are_brought_to_their_order_in_their_bits(tmp_path, name):
    """Rows are; columns, which a block may have of several heads, are expanded."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "linear_value_head_dim": 16}
    tensor_type = GGMLQuantizationType[name]
    _, path = write_family_gguf(tmp_path / "model", "qwen35", sizes, tensor_type=tensor_type)
    require_own_bits(path)


@pytest.mark.parametrize(
    "arch", ["granitehybrid", "granitehybrid-dense", "falcon-h1", "nemotron_h", "nemotron_h_moe"]
)
def test_a_hybrid_of_mamba_2_keeps_its_bits(tmp_path, arch):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    tensor_type = GGMLQuantizationType.Q8_0
    _, path = write_family_gguf(tmp_path / "model", arch, sizes, tensor_type=tensor_type)
    require_own_bits(path)


def test_experts_in_mxfp4_have_the_logits_of_the_expanded_ones(tmp_path):
    """Elements are exact, and activations are not rounded."""
    path = write_experts(tmp_path, "gpt-oss", "MXFP4")
    kept, plain = load(path, "gguf-packed"), load(path, "gguf")
    assert kept.weights_bytes < 0.25 * plain.weights_bytes
    assert torch.equal(*(Bench(model).logits(PROMPT, [3]) for model in (kept, plain)))
    data = bytearray(path.read_bytes())
    data[read_gguf(path).tensors["blk.1.ffn_up_exps.weight"].offset] = 253
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight .* the scale 253"):
        load(path, "gguf-packed")


def test_experts_in_blocks_of_integers_are_refused_on_a_gpu_before_weights_are_read(tmp_path):
    path = write_experts(tmp_path, "qwen3moe", "Q4_1")
    kernels = SimpleNamespace(require_integer_experts=TRITON.require_integer_experts)
    with pytest.raises(UnsupportedError, match=r"experts in the bits .* no products on a GPU"):
        load(path, "gguf-packed", kernels)


@pytest.mark.parametrize("arch", ["glm4moe", "deepseek2-flash", "qwen35"])
def test_a_module_keeps_its_bits_and_is_refused_where_it_has_no_products(tmp_path, arch):
    path = write_experts(tmp_path, arch, "Q8_0")
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "max_positions": 64}

    def module(load_format, kernels=native):
        target = load(path, load_format, native)
        return open_module(path, load_format=load_format).load(target, kernels=kernels, **options)

    assert module("gguf-packed").nbytes < 0.45 * module("gguf").nbytes
    if arch != "qwen35":
        kernels = SimpleNamespace(require_integer_experts=TRITON.require_integer_experts)
        with pytest.raises(UnsupportedError, match="no products on a GPU"):
            module("gguf-packed", kernels)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, under the interpreter")
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_kernels_of_a_gpu_give_the_bits_of_the_expanded_model(tmp_path, name):
    path = write_gguf(tmp_path / "model.gguf", name)
    kernels = TRITON
    kept, plain = (load(path, each, kernels) for each in ("gguf-packed", "gguf"))
    assert isinstance(kept.embedding, Int4DeviceWeight)
    found, wanted = (OneRun(model).logits(PROMPT, []) for model in (kept, plain))
    assert torch.equal(found, wanted)
    norms = [RMSNorm(kernels, torch.rand(64), eps) for eps in (1e-5, 0.1)]
    ids, hidden = torch.tensor(PROMPT), torch.randn(len(PROMPT), 64)
    beside, expected = (
        kernels.embed_beside(ids, model.embedding, norms[0], hidden, norms[1])
        for model in (kept, plain)
    )
    assert torch.equal(beside, expected)


def test_types_without_such_products_are_expanded(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "Q5_0")
    found, wanted = (Bench(load(path, each)).logits(PROMPT, []) for each in ("gguf-packed", "gguf"))
    assert torch.equal(found, wanted)


def test_a_scale_that_is_not_finite_is_named(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "Q4_1")
    data = bytearray(path.read_bytes())
    offset = read_gguf(path).tensors["blk.1.ffn_down.weight"].offset
    data[offset : offset + 2] = b"\x00\x7e"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight .* holds NaN"):
        load(path, "gguf-packed")


def test_cuts_within_blocks_and_directories_without_a_gguf_file_are_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "Q4_1")
    with pytest.raises(ConfigError, match=r"96 features of .*down_proj within a block of 32 of Q4"):
        load(path, "gguf-packed", parallel=SimpleNamespace(size=2, rank=0))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds 0 GGUF models"):
        load(tmp_path / "empty", "gguf-packed")
