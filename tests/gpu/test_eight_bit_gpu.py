"""Drafts' logits of eight-bit weights on a chip: their row law, and the tokens end to end."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from gpu_files import OPTIONS, requests, speculation, write_files
from recorded_gpu import Recording, drive

from helpers.checkpoints import write_checkpoint
from helpers.hybrids import FULL, LINEAR, twin_config, twin_tensors
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.kernels.gemm import eight_bit
from sametoken.kernels.gemm.eight_bit import EightBitWeight, quantize
from sametoken.kernels.gemm.eight_bit_triton import DEPTH, default_config, logits, rounded
from sametoken.kernels.gemm.tuning import TritonConfig
from sametoken.kernels.select import select_kernels
from sametoken.models.loader import load_model
from sametoken.models.mtp_checkpoint import MTPCheckpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
MAX_TOKENS = 64
HYBRID = {
    "vocab_size": 1500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}
CONFIGS = [
    TritonConfig(16, 64, DEPTH, num_warps=4, num_stages=6, overlap=True),
    TritonConfig(32, 128, DEPTH, num_warps=8, num_stages=3, tma=True),
    TritonConfig(64, 256, DEPTH, num_warps=8, num_stages=3),
    TritonConfig(64, 128, DEPTH, num_warps=4, num_stages=4, tma=True, tma_rows=False),
    TritonConfig(256, 64, DEPTH, num_warps=8, num_stages=3),
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device=CUDA, generator=generator, dtype=torch.bfloat16)


@functools.lru_cache(maxsize=1)
def weight_of(features: int, depth: int) -> EightBitWeight:
    return quantize(normal(features, depth, seed=1) / depth**0.5)


# Logits


@pytest.mark.parametrize(
    ("features", "depth"),
    [(248320, 4096), (151936, 4096), (32000, 4096), (8192, 576), (400, 1544)],
)
def test_logits_are_those_of_the_reference(features, depth):
    x, weight = normal(64, depth), weight_of(features, depth)
    expected = eight_bit.logits(x, weight)
    # Of each of 33 terms the unit cuts off up to 2**-13 of the largest, a sum of 128 products
    # or one of them: below 2**5 deviations of a product. K / 32 times 33 such errors, each
    # as often up as down, make up to sqrt(33 / 32) * 2**-8 of the deviation of K products.
    bound = 2**-7
    for rows in (1, 4, 32, 64):
        got = logits(x[:rows], weight)
        assert got.dtype == torch.float32
        error = (got - expected[:rows]).norm() / expected[:rows].norm()
        assert error < bound, (rows, float(error))


def test_sums_of_integers_beyond_14_bits_are_exact():
    """A turn's sum stays below 2**13; that of all turns, added in fp32, passes 2**16."""
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"device": CUDA, "generator": generator}
    x = torch.randint(1, 8, (70, 8192), **options).bfloat16()
    matrix = torch.randint(1, 8, (1024, 8192), **options).float().to(torch.float8_e4m3fn)
    weight = EightBitWeight(matrix, torch.ones(1024, device=CUDA))
    expected = (x.double() @ matrix.double().T).float()
    assert expected.min() > 2**16
    for rows in (1, 16, 33, 70):
        assert torch.equal(logits(x[:rows], weight), expected[:rows])


def test_every_activation_of_16_bits_is_rounded_as_by_the_reference():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=CUDA)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype)
        got, expected = rounded(x), eight_bit.rounded(x)
        is_nan = x.isnan()
        assert torch.equal(got.view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan])
        assert torch.equal(got.float().isnan(), is_nan)


def test_a_row_with_nan_has_no_logits():
    x, weight = normal(3, 576), weight_of(8192, 576)
    x[1, 500] = torch.nan
    is_nan = logits(x, weight).isnan()
    assert is_nan[1].all()
    assert not is_nan[[0, 2]].any()


@pytest.mark.parametrize(("features", "depth"), [(8192, 1024), (8192, 576), (100_352, 512)])
def test_no_tile_and_no_number_of_rows_changes_a_row(features, depth):
    x, weight = normal(300, depth), weight_of(features, depth)
    first = TritonConfig(16, 64, DEPTH, num_warps=4, num_stages=4)
    expected = torch.cat([logits(x[i : i + 16], weight, first) for i in range(0, 300, 16)])
    for rows in (1, 3, 16, 17, 32, 33, 64, 65, 300):
        for config in (*CONFIGS, default_config(features, rows, overlap=True)):
            out = logits(x[:rows], weight, config)
            assert torch.equal(out, expected[:rows]), (config, rows)
    company = torch.full_like(x, torch.nan)
    company[77] = x[0]
    assert torch.equal(logits(company, weight)[77], expected[0])


def test_a_captured_chain_of_dependent_products_replays_the_same_bits():
    weights = [quantize(normal(2048, 2048, seed=seed) / 45) for seed in range(8)]
    x = normal(4, 2048).float()

    def chain() -> torch.Tensor:
        y = x
        for weight in weights * 4:
            y = logits(y, weight)
        return y

    def one_by_one() -> torch.Tensor:
        y = x
        for weight in weights * 4:
            y = logits(y, weight)
            torch.cuda.synchronize()
        return y

    one_by_one()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for seed in range(10):
        x.copy_(normal(4, 2048, seed=seed))
        graph.replay()
        assert torch.equal(out, one_by_one())


def test_quantizing_takes_no_second_copy_of_a_large_weight():
    weight_of.cache_clear()
    weight = normal(248320, 4096)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = quantize(weight)
    assert torch.cuda.max_memory_allocated() - before < made.nbytes + (512 << 20)
    part = slice(200_000, 200_064)
    stands_for = made.matrix[part].float() * made.scale[part, None]
    # Three bits of mantissa, rounded to nearest; the least step is 2**-9.
    error = (stands_for - weight[part].float()).abs()
    assert (error <= weight[part].float().abs() / 16 + made.scale[part, None] / 1024).all()


# Engines


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A target and an EAGLE-3 head that knows nothing of it."""
    return write_files(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """A hybrid whose module computes what it does, but for bf16's rounding of the embedding."""
    return write_twin(tmp_path_factory.mktemp("twin"))


def write_twin(folder):
    config = twin_config(**HYBRID)
    tensors = {name: tensor.bfloat16() for name, tensor in twin_tensors(config).items()}
    return write_checkpoint(folder, config, tensors)


def generate(path, spec: dict | None, items, **options) -> Recording:
    core = build_engine(
        EngineConfig.from_options(
            model=str(path), speculative_config=spec, max_num_seqs=8, **OPTIONS | options
        )
    )
    return drive(core, items)


def test_a_quantized_eagle3_head_changes_no_token(dense):
    items = list(requests(12, MAX_TOKENS))
    spec = speculation(dense)["eagle3"] | {"quantization": "fp8"}
    plain = generate(dense["target"], None, items, enforce_eager=True)
    for eager in (False, True):
        ran = generate(dense["target"], spec, items, enforce_eager=eager)
        assert ran.tokens == plain.tokens
        assert ran.offered > 0


def test_a_quantized_module_changes_no_token_and_is_nearly_as_good(twin):
    """Token 0 begins every prompt, as a twin wants it."""
    items = list(first_token_zero(requests(16, MAX_TOKENS)))
    module = {"method": "mtp", "num_speculative_tokens": 3}
    plain = generate(twin, None, items, enforce_eager=True)
    whole = generate(twin, module, items)
    graph, eager = (
        generate(twin, module | {"quantization": "fp8"}, items, enforce_eager=eager)
        for eager in (False, True)
    )
    assert whole.tokens == graph.tokens == eager.tokens == plain.tokens
    # On the CPU 0.98 of all drafts are accepted, and 0.91 of a quantized module's.
    assert whole.accepted > 0.85 * whole.offered
    for ran in (graph, eager):
        assert ran.accepted > 0.75 * ran.offered


def first_token_zero(items):
    for item in items:
        yield replace(item, prompt_token_ids=(0, *item.prompt_token_ids[1:]))


def test_drafts_of_a_quantized_module_are_mostly_those_of_the_module_as_it_is(twin):
    """Over rows that nothing relates."""
    plain, quantized = logits_of(twin, CUDA)
    error = (quantized - plain).norm() / plain.norm()
    # A matrix in e4m3 is 0.026 off, its mantissa of 3 bits rounded to nearest, and rows are too.
    assert 0.01 < error < 2 * 0.026
    # Of 1500 logits the two largest are 0.26 deviations apart on average.
    assert (quantized.argmax(dim=1) == plain.argmax(dim=1)).float().mean() > 0.8


def logits_of(path, device: torch.device) -> list[torch.Tensor]:
    """[512, V] fp32 of the module as it is, and of the quantized one."""
    kernels = select_kernels(device)
    options = {"dtype": torch.bfloat16, "device": device, "max_positions": 64}
    target = load_model(path, kernels=kernels, **options)
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    head = MTPCheckpoint(path).load(target, kernels=kernels, **options)
    last = head.norm(head.layer.mlp(head.fc(x)))
    quantized = replace(head, lm_head=kernels.eight_bit(head.lm_head))
    return [one.compute_logits(last) for one in (head, quantized)]


def test_an_own_projection_leaves_memory_when_its_eight_bits_are_made():
    kernels = select_kernels(CUDA)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    weight = kernels.pack(normal(32000, 4096))
    weight = kernels.eight_bit(weight)
    assert torch.cuda.memory_allocated() - before < weight.nbytes + (4 << 20)
