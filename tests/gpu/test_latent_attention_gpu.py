"""Latent attention on a chip: values, bits of rows in any batch, and engines over it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from gpu_files import requests, write_nextn_target
from recorded_gpu import answer

from helpers.rows import runs_of
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.hopper import is_hopper
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.model.latent_attention import (
    heads_triton,
    hopper,
    reference,
    rope_triton,
    triton,
)
from sametoken.ops.model.latent_attention.hopper import LatentHopperConfig
from sametoken.ops.model.latent_attention.shape import LatentRotary, LayerLatent
from sametoken.ops.model.latent_attention.tuning import LatentConfig

RANK, ROPE, SCALE = 512, 64, 0.07
HEADS = [16, 20, 128]
LENGTHS = [5300, 1030, 300, 1]
FORMS = [
    LatentConfig("sequential", 64, 64, num_warps=8, num_stages=2),
    LatentConfig("split_kv", 64, 64, num_warps=8, num_stages=2),
    LatentConfig("split_kv", 32, 64, num_warps=4, num_stages=2, kv_left=True),
    LatentConfig("sequential", 32, 64, num_warps=4, num_stages=2, kv_left=True),
    LatentConfig("split_kv", 32, 64, num_warps=8, num_stages=1, kv_left=True),
    *hopper.CONFIGS.values(),
    hopper.JOINING,
    hopper.WHOLE_ROWS,
    *(replace(hopper.CONFIGS[queries], programs=7) for queries in (32, 64)),
    replace(hopper.JOINING, programs=7),
]
ON_HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
KERNELS = [triton, pytest.param(hopper, marks=needs_hopper)]
MAX_TOKENS = 48


class Scene:
    """Slots of given lengths in shuffled blocks; elsewhere latents are huge and keys NaN."""

    def __init__(self, heads, dtype=torch.bfloat16, block_size=16):
        random = torch.Generator("cuda").manual_seed(0)
        max_blocks = -(-max(LENGTHS) // block_size) + 3
        num_blocks = max_blocks * len(LENGTHS)
        order = torch.randperm(num_blocks, device="cuda", generator=random)
        random.manual_seed(1)
        reserved = torch.full((1, max_blocks), num_blocks, device="cuda")
        self.table = torch.cat((order.view(len(LENGTHS), max_blocks), reserved))
        size = (num_blocks + 1, block_size, RANK + ROPE)
        huge = min(1e30, torch.finfo(dtype).max)
        vectors = torch.full(size, huge, dtype=dtype, device="cuda")
        vectors[..., RANK:] = torch.nan
        vectors[-1] = 0
        size = (len(LENGTHS), max(LENGTHS), RANK + ROPE)
        self.history = torch.randn(size, device="cuda", generator=random).to(dtype)
        for slot, length in enumerate(LENGTHS):
            at = torch.arange(length, device="cuda")
            vectors[self.table[slot, at // block_size], at % block_size] = self.history[
                slot, :length
            ]
        self.memory = LayerLatent(vectors, RANK)
        size = (4096, heads, RANK + ROPE)
        self.queries = torch.randn(size, device="cuda", generator=random).to(dtype)

    def run(self, where, window=1, *, runs=None, kernels=triton, config=None):
        slots, positions = (
            one.contiguous() for one in torch.tensor(where, device="cuda").unbind(1)
        )
        q = self.queries[(slots * 67 + positions) % 4096]
        runs = runs or RowRuns.even(len(where) // window, window)
        rows = AttentionRows(positions, slots, torch.zeros_like(slots), self.table, runs)
        return kernels.attention(q, SCALE, rows, self.memory, config=config)

    def exact(self, slot, position):
        seen = self.history[slot, : position + 1].double()
        q = self.queries[(slot * 67 + position) % 4096].double()
        return torch.softmax(q @ seen.T * SCALE, dim=-1) @ seen[:, :RANK]


@pytest.fixture(scope="module", params=HEADS)
def scene(request):
    return request.param, Scene(request.param)


BORDERS = [0, 1, 63, 64, 255, 256, 257, 1023, 1024, 1025, 1535, 1536, 4095, 4096, 5119, 5120, 5299]


@pytest.mark.parametrize("kernels", KERNELS)
def test_values_are_those_of_fp64(scene, kernels):
    heads, one = scene
    out = one.run([(0, position) for position in BORDERS], kernels=kernels)
    for row, position in enumerate(BORDERS):
        expected = one.exact(0, position)
        torch.testing.assert_close(out[row].double(), expected, rtol=2e-2, atol=2e-2)
    assert out.shape == (len(BORDERS), heads, RANK)


@pytest.mark.parametrize("config", FORMS, ids=str)
def test_prompts_windows_and_single_rows_have_equal_bits(scene, config):
    heads, one = scene
    if isinstance(config, LatentHopperConfig):
        kernels = hopper
        if not ON_HOPPER:
            pytest.skip("needs a Hopper GPU")
    else:
        kernels = triton
        if config.block_queries < 64 and heads > config.block_queries:
            pytest.skip("a tile has no room for a row's heads")
    prompt = one.run([(0, at) for at in range(5300)], 5300, kernels=kernels)
    for position in BORDERS:
        alone = one.run([(0, position)], kernels=kernels, config=config)
        assert torch.equal(alone[0], prompt[position])
    for width in (2, 3, 5, 17):
        last = [(0, at) for at in range(1026 - width, 1026)]
        window = one.run(last, width, kernels=kernels, config=config)
        assert torch.equal(window, prompt[1026 - width : 1026])


@needs_hopper
@pytest.mark.parametrize(
    ("heads", "dtype", "prompt"),
    [(1, torch.float16, 300), (33, torch.bfloat16, 90), (128, torch.float16, 23)],
    ids=str,
)
def test_all_launches_on_hopper_have_equal_bits(heads, dtype, prompt):
    """Prompts, windows and single rows in uneven runs with dead rows."""
    one = Scene(heads, dtype, block_size=64)
    where = [(0, at) for at in range(5200 - prompt, 5200)] + [(4, 0)]
    where += [(1, at) for at in range(1017, 1030)] + [(4, 0), (4, 0)]
    where += [(2, 255), (2, 256), (2, 257), (3, 0), (4, 0)]
    runs = runs_of([prompt + 1, 15, 0, 3, 2], device="cuda")
    live = torch.tensor([slot < 4 for slot, _ in where], device="cuda")
    expected = one.run(where, runs=runs, kernels=hopper, config=hopper.CONFIGS[16])
    picked = [0, prompt - 1, prompt + 13, len(where) - 3, len(where) - 2]
    exact = torch.stack([one.exact(*where[row]) for row in picked])
    torch.testing.assert_close(expected[picked].double(), exact, rtol=2e-2, atol=2e-2)
    spread = [*hopper.CONFIGS.values(), hopper.JOINING]
    several = [replace(config, programs=7) for config in spread]
    for config in (*spread, *several, hopper.WHOLE_ROWS, None):
        found = one.run(where, runs=runs, kernels=hopper, config=config)
        assert torch.equal(found, expected)
        assert not found[~live].any()


@needs_hopper
@pytest.mark.parametrize(
    ("heads", "dtype", "block_size", "prompt"),
    [(16, torch.bfloat16, 64, 100), (20, torch.bfloat16, 16, 100), (128, torch.float16, 128, 23)],
    ids=str,
)
def test_float8_has_the_bits_of_its_numbers_in_16_bits_on_hopper(heads, dtype, block_size, prompt):
    """In every form, with its scale; elsewhere latents are as large as they can be, keys NaN."""
    one = Scene(heads, dtype, block_size=block_size)
    stored = one.memory.vectors.clamp(-448, 448).to(FLOAT8)
    where = [(0, at) for at in range(5200 - prompt, 5200)] + [(1, at) for at in range(1017, 1030)]
    where += [(4, 0), (4, 0), (2, 255), (2, 256), (2, 257), (3, 0), (4, 0)]
    runs = runs_of([prompt, 15, 0, 3, 2], device="cuda")
    spread = [*hopper.CONFIGS.values(), hopper.JOINING]
    several = [replace(config, programs=7) for config in spread]
    for scale in (1.0, 0.5):
        one.memory = LayerLatent((stored.to(dtype) * scale).to(dtype), RANK)
        expected = one.run(where, runs=runs, kernels=hopper)
        assert expected.isfinite().all()
        given = None if scale == 1.0 else torch.full((1,), scale, device="cuda")
        one.memory = LayerLatent(stored, RANK, given)
        for config in (*spread, *several, hopper.WHOLE_ROWS, None):
            found = one.run(where, runs=runs, kernels=hopper, config=config)
            assert torch.equal(found, expected), (scale, config)
    one.memory = LayerLatent(stored, RANK, torch.full((1,), 0.3, device="cuda"))
    expected = one.run(where, runs=runs, kernels=hopper)
    near = one.run(where, runs=runs, kernels=triton)
    torch.testing.assert_close(expected, near, rtol=2e-2, atol=2e-2)
    for config in (*spread, *several, hopper.WHOLE_ROWS):
        assert torch.equal(one.run(where, runs=runs, kernels=hopper, config=config), expected)


@needs_hopper
@pytest.mark.parametrize("programs", [1, 3, 131])
@pytest.mark.parametrize(("heads", "dtype"), [(16, torch.float16), (20, torch.bfloat16)], ids=str)
def test_programs_of_any_number_of_splits_have_the_bits_of_pairs(heads, dtype, programs):
    """Of runs in turns short and long, whose splits have an odd or even number of tiles."""
    one = Scene(heads, dtype)
    lone = [(0, at) for pair in zip(BORDERS, reversed(BORDERS), strict=True) for at in pair]
    where = [*lone, (1, 1027), (1, 1028), (4, 0), (2, 200)]
    runs = runs_of([*[1] * len(lone), 0, 3, 1], device="cuda")
    expected = one.run(where, runs=runs, kernels=hopper, config=hopper.CONFIGS[64])
    for joins in (False, True) * 5:
        config = LatentHopperConfig(16 if heads == 16 or joins else 32, programs, joins)
        found = one.run(where, runs=runs, kernels=hopper, config=config)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kernels", KERNELS)
def test_company_and_dead_rows_change_no_bit(scene, kernels):
    _, one = scene
    run = partial(one.run, kernels=kernels)
    lone = {at: run([at])[0] for at in ((0, 5299), (1, 1029), (2, 17), (3, 0))}
    live = [(0, 5299), (1, 1029), (2, 17), (3, 0)]
    assert torch.equal(run(live), torch.stack([lone[at] for at in live]))
    ragged = [(0, 5299), (4, 0), (1, 1029), (2, 17), (4, 0), (4, 0), (3, 0)]
    for num_short in (4, 0):
        out = run(ragged, runs=runs_of([2, 1, 3, 1], num_short, "cuda"))
        for row, at in enumerate(ragged):
            assert torch.equal(out[row], lone[at]) if at in lone else not out[row].any()


@needs_hopper
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_blocks_of_every_size_have_equal_bits_on_hopper(block_size):
    where = [(0, position) for position in BORDERS]
    expected = Scene(20, block_size=64).run(where, kernels=hopper)
    one = Scene(20, block_size=block_size)
    for config in (None, hopper.CONFIGS[64], hopper.WHOLE_ROWS):
        assert torch.equal(one.run(where, kernels=hopper, config=config), expected)


@needs_hopper
def test_a_faulty_key_spoils_only_rows_that_see_it_on_hopper():
    one, where = Scene(20), [(0, at) for at in range(290, 310)]
    expected = one.run(where, 20, kernels=hopper)
    one.memory.vectors[one.table[0, 300 // 16], 300 % 16, RANK:] = torch.nan
    for config in (*hopper.CONFIGS.values(), hopper.JOINING, hopper.WHOLE_ROWS):
        found = one.run(where, 20, kernels=hopper, config=config)
        assert torch.equal(found[:10], expected[:10])
        assert found[10:].isnan().all()


def test_the_engine_chooses_one_tile_for_all_rows():
    for heads in HEADS:
        tiles = {triton.choose(runs, width, heads, 16384, torch.bfloat16).tile
                 for runs in (1, 8, 64) for width in (1, 4, 2048)}  # fmt: skip
        assert len(tiles) == 1


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("features", "depth"), [(512, 128), (512, 192), (128, 512), (256, 512)])
def test_products_of_heads_do_not_depend_on_the_row_count(features, depth, transposed):
    x = torch.randn(1100, 20, depth, device="cuda").bfloat16()
    matrices = torch.randn(20, features, depth, device="cuda").bfloat16()
    if transposed:
        matrices = matrices.mT.contiguous().mT
    whole = torch.empty(1100, 20, features, device="cuda", dtype=torch.bfloat16)
    heads_triton.head_products(x, matrices, whole)
    exact = torch.einsum("thk,hnk->thn", x.double(), matrices.double())
    torch.testing.assert_close(whole.double(), exact, rtol=1e-2, atol=0.3)
    for rows in (1, 2, 15, 17, 33, 64, 129):
        part = torch.empty_like(whole[:rows])
        heads_triton.head_products(x[:rows].contiguous(), matrices, part)
        assert torch.equal(part, whole[:rows])
    blocks = torch.empty_like(whole).view(11, 20, 100, features).transpose(1, 2)
    heads_triton.head_products(x.view(11, 100, 20, depth), matrices, blocks)
    assert torch.equal(blocks.flatten(0, 1), whole)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_and_write_are_those_of_the_reference(interleaved):
    torch.manual_seed(0)
    angles = torch.rand(300, ROPE // 2)
    positions, found = torch.randperm(300)[:70], []
    for device, run in (("cpu", reference.rope_and_cache), ("cuda", rope_triton.rope_and_cache)):
        random = torch.Generator().manual_seed(1)
        q = torch.randn(70, 20, 256, generator=random).bfloat16().to(device)
        latent = torch.randn(70, 768 + 576, generator=random).bfloat16().to(device)
        weight = torch.randn(RANK, generator=random).bfloat16().to(device)
        rotary = LatentRotary(
            weight, 1e-6, angles.cos().to(device), angles.sin().to(device), interleaved
        )
        memory = LayerLatent(torch.zeros(20, 16, 576, dtype=torch.bfloat16, device=device), RANK)
        where = positions.to(device)
        rows = AttentionRows(where, where, where + 3, where[None])
        out = torch.zeros(70, 20, 576, dtype=torch.bfloat16, device=device)
        run(q[..., 192:], latent[:, 768:], rotary, rows, memory, out[..., RANK:])
        found.append((memory.vectors.cpu(), out.cpu()))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.fixture(scope="module", params=[4, 20])
def target(request, tmp_path_factory):
    return write_nextn_target(tmp_path_factory.mktemp("nextn"), request.param)


def generate(target, spec, count, **options):
    items = requests(count, MAX_TOKENS)
    return answer(target, items, speculative_config=spec, **options)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("method", ["plain", "ngram", "mtp"])
def test_the_same_tokens(target, method, eager):
    truth = generate(target, None, 16, max_num_seqs=1, enforce_eager=True).tokens
    spec = None if method == "plain" else {"method": method, "num_speculative_tokens": 3}
    ran = generate(target, spec, 16, max_num_seqs=7, enforce_eager=eager)
    assert ran.tokens == truth
    assert (ran.offered > 0) == (method != "plain")


@pytest.mark.parametrize("fast_from", [0, 8])
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_vectors_in_float8_have_the_same_tokens(target, method, fast_from):
    """Alone and whole, or in graphs with drafts and by chunks that end inside blocks."""
    options = {"kv_cache_dtype": "fp8", "fast_prompts_from": fast_from}
    truth = generate(target, None, 16, max_num_seqs=1, enforce_eager=True, **options).tokens
    spec = {"method": method, "num_speculative_tokens": 3}
    ran = generate(target, spec, 16, max_num_seqs=7, prefill_chunk_size=19, **options)
    assert ran.tokens == truth
    assert ran.offered > 0


@pytest.mark.parametrize("method", ["plain", "ngram", "mtp"])
def test_expanded_prompts_have_the_same_tokens_in_any_chunks(target, method):
    """Alone and whole, or in a crowd by chunks of other sizes, which end inside blocks."""
    fast = {"fast_prompts_from": 8, "enable_prefix_caching": True}
    truth = generate(target, None, 16, max_num_seqs=1, **fast).tokens
    spec = None if method == "plain" else {"method": method, "num_speculative_tokens": 3}
    ran = generate(target, spec, 16, max_num_seqs=7, prefill_chunk_size=19, **fast)
    assert ran.tokens == truth
    assert (ran.offered > 0) == (method != "plain")
