"""Keyed sampling in Triton: the reference's noise bit for bit, and its choices."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sametoken.ops.backend import SampledRows
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.sampling import sample as reference
from sametoken.ops.sampling import sample_triton as sampling
from sametoken.ops.sampling.sample import has_nan, has_no_valid_token, token_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURES = [0.0, 0.7, 1.0, 0.0, 2.5]
SEEDS = [0, 1, 2**31, 2**32 + 5, 2**63 - 1]
POSITIONS = [0, 1, 77, 2**31 + 3, 2**33 + 1]


@triton.jit
def noise_kernel(seeds, positions, words, noise, first_id, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    drawn = sampling.philox_words(tl.load(seeds + row), tl.load(positions + row), first_id, BLOCK)
    at = row * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + at, drawn.to(tl.int64))
    tl.store(noise + at, sampling.gumbel_noise(drawn))


def reference_words(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    blocks = torch.arange(count // 4, device=DEVICE)[None, :]
    low, high = positions[:, None] & 0xFFFFFFFF, positions[:, None] >> 32
    key = (seeds[:, None] & 0xFFFFFFFF, seeds[:, None] >> 32)
    words = reference.philox((blocks, low, high, torch.zeros_like(low)), key)
    return torch.stack(words, dim=-1).flatten(1)


def test_noise_words_are_the_references_bit_for_bit():
    seeds, positions = (torch.tensor(x, device=DEVICE) for x in (SEEDS, POSITIONS))
    words = torch.empty(5, 64, dtype=torch.int64, device=DEVICE)
    noise = torch.empty(5, 64, device=DEVICE)
    noise_kernel[(5,)](seeds, positions, words, noise, 1024, BLOCK=64)
    assert torch.equal(words, reference_words(seeds, positions, 1088)[:, 1024:])
    expected = reference.gumbel_noise(seeds, positions, 1088)[:, 1024:]
    torch.testing.assert_close(noise, expected, rtol=1e-5, atol=1e-5)


@triton.jit
def gumbel_kernel(words, noise, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(noise + at, sampling.gumbel_noise(tl.load(words + at).to(tl.uint32)))


def test_gumbel_noise_is_right_at_both_ends_of_the_uniform():
    edges = [0, 1, 2, 63, 2**26 - 1, 2**26, 2**26 + 64, 2**31, 2**32 - 2**7, 2**32 - 1]
    words = torch.tensor(edges + [2**20] * 6, device=DEVICE)
    noise = torch.empty(16, device=DEVICE)
    gumbel_kernel[(1,)](words, noise, BLOCK=16)
    uniform = (words.float() * 2**-32 + 2**-33).clamp(max=1 - 2**-24).double()
    expected = -torch.log(-torch.log1p(-uniform))
    torch.testing.assert_close(noise.double(), expected, rtol=1e-5, atol=1e-5)


def parameters(rows: int) -> list[torch.Tensor]:
    """Rows that are greedy and rows that sample, side by side."""
    return [torch.tensor(x[:rows], device=DEVICE) for x in (TEMPERATURES, SEEDS, POSITIONS)]


@pytest.mark.parametrize("vocab_size", [1, 7, 1024, 2500])
def test_sample_chooses_the_references_tokens(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (3 * torch.randn(5, vocab_size, generator=generator)).to(DEVICE)
    before = logits.clone()
    tokens = sampling.sample(logits, *parameters(5))
    assert torch.equal(tokens, reference.sample(logits, *parameters(5)))
    assert torch.equal(logits, before)
    greedy = torch.zeros(5, device=DEVICE), *parameters(5)[1:]
    assert torch.equal(sampling.sample(logits, *greedy), logits.argmax(dim=-1))


@pytest.mark.parametrize(("columns", "vocab_size"), [(1, 9), (7, 7), (1030, 1500), (1300, 5001)])
@pytest.mark.parametrize("repeats", [1, 4])
def test_mapped_columns_choose_what_the_whole_vocabulary_chooses(columns, vocab_size, repeats):
    generator = torch.Generator().manual_seed(columns)
    logits = (3 * torch.randn(5 * repeats, columns, generator=generator)).to(DEVICE)
    logits[::2] = logits[::2].round()
    token_ids = torch.randperm(vocab_size, generator=generator)[:columns].sort().values.to(DEVICE)
    full = torch.full((5 * repeats, vocab_size), -torch.inf, device=DEVICE)
    full[:, token_ids] = logits
    chosen = [values.repeat(repeats) for values in parameters(5)]
    found = sampling.sample(logits, *chosen, token_ids)
    assert torch.equal(found, sampling.sample(full, *chosen))
    assert torch.equal(found, reference.sample(logits, *chosen, token_ids))


@pytest.mark.parametrize("mapped", [False, True])
def test_parameters_by_slot_are_those_of_each_row(mapped):
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(4, 1030, generator=generator)).to(DEVICE)
    token_ids = torch.arange(7, 7 + 2 * 1030, 2, device=DEVICE) if mapped else None
    slots = torch.tensor([4, 0, 2, 4], device=DEVICE)
    temperature, seeds, positions = parameters(5)
    wanted = reference.sample(logits, temperature[slots], seeds[slots], positions[:4], token_ids)
    for kernels in (sampling, reference):
        found = kernels.sample(logits, temperature, seeds, positions[:4], token_ids, slots)
        assert torch.equal(found, wanted)


@triton.jit
def words_of_kernel(token_ids, words, seed, position, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    drawn = sampling.philox_words_of(tl.load(seed), tl.load(position), tl.load(token_ids + at))
    tl.store(words + at, drawn.to(tl.int64))


@pytest.mark.parametrize("i", range(5))
def test_noise_words_of_scattered_ids_are_the_references_bit_for_bit(i):
    seed, position = (torch.tensor([x[i]], device=DEVICE) for x in (SEEDS, POSITIONS))
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(i))
    token_ids = order[:64].sort().values.to(DEVICE)
    words = torch.empty(64, dtype=torch.int64, device=DEVICE)
    words_of_kernel[(1,)](token_ids, words, seed, position, BLOCK=64)
    assert torch.equal(words, reference_words(seed, position, 4096)[0, token_ids])


def test_equal_values_of_mapped_columns_give_the_lowest_id_across_tiles():
    logits = torch.full((3, 2100), -3.0, device=DEVICE)
    logits[0, [1030, 2099]] = 4.0
    logits[1, [5, 2000]] = 4.0
    logits[2] = -torch.inf
    greedy = torch.zeros(3, device=DEVICE), *parameters(3)[1:]
    token_ids = torch.arange(10, 2110, device=DEVICE) * 3
    assert sampling.sample(logits, *greedy, token_ids).tolist() == [3120, 45, 30]


def test_a_row_chooses_alone_what_it_chooses_in_company():
    logits = torch.randn(5, 1300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    temperature, seeds, positions = parameters(5)
    together = sampling.sample(logits, temperature, seeds, positions)
    for i in range(5):
        one = slice(i, i + 1)
        alone = sampling.sample(logits[one].clone(), temperature[one], seeds[one], positions[one])
        assert torch.equal(alone, together[one])


def rows_at(slots: torch.Tensor, positions: torch.Tensor) -> SampledRows:
    return SampledRows(None, slots, positions, positions, positions)


def choices(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens in rows of keys, and which rows hold NaN."""
    best = keys.amax(dim=1)
    return reference.token_of(best), reference.has_nan(best)


def test_tiles_of_many_rows_choose_what_tiles_of_few_choose():
    logits = torch.randn(20, 5000, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    logits[17, 4500], logits[18, [4097, 4999]] = torch.nan, 9.0
    temperature, seeds, positions = (values.repeat(4) for values in parameters(5))
    slots = torch.arange(20, device=DEVICE)
    many = sampling.token_keys(logits, temperature, seeds, rows_at(slots, positions))
    tokens, has_nan = choices(many)
    for i in range(20):
        one = slice(i, i + 1)
        alone = rows_at(slots[one], positions[one])
        few = sampling.token_keys(logits[one].clone(), temperature, seeds, alone)
        assert few.shape[1] > many.shape[1]
        assert choices(few) == (tokens[i], has_nan[i])
    assert has_nan.nonzero().squeeze(1).tolist() == [17]


def test_equal_values_give_the_lowest_id_across_tiles():
    logits = torch.full((4, 2100), -3.0, device=DEVICE)
    logits[0, [1030, 2099]] = 4.0
    logits[1, [5, 2000]] = 4.0
    logits[2, [7, 1500]] = torch.tensor([-0.0, 0.0], device=DEVICE)
    logits[3] = -torch.inf
    greedy = torch.zeros(4, device=DEVICE), *parameters(4)[1:]
    assert sampling.sample(logits, *greedy).tolist() == [1030, 5, 7, 0]


def test_infinite_logits_order_as_numbers_do():
    logits = torch.full((2, 1100), -torch.inf, device=DEVICE)
    logits[0, 1050] = -1e38
    logits[1, 3] = torch.inf
    temperature, seeds, positions = parameters(3)
    assert sampling.sample(logits, temperature[1:], seeds[1:], positions[1:]).tolist() == [1050, 3]


@pytest.mark.parametrize("value", [torch.nan, -torch.nan])
def test_nan_poisons_its_row_alone(value):
    logits = torch.randn(5, 1300, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    clean = logits.clone()
    logits[1, 1299], logits[3, 0], logits[3, 4] = value, value, torch.inf
    temperature, seeds, positions = parameters(5)
    slots = torch.arange(5, device=DEVICE)
    keys = sampling.token_keys(logits, temperature, seeds, rows_at(slots, positions))
    tokens, has_nan = choices(keys)
    assert has_nan.tolist() == [False, True, False, True, False]
    assert ((tokens >= 0) & (tokens < 1300)).all()
    expected = sampling.sample(clean, temperature, seeds, positions + 1)
    assert torch.equal(tokens[[0, 2, 4]], expected[[0, 2, 4]])


def test_keys_are_those_of_every_bundle():
    """The target's own token by its slot's parameters; NaN and a row without a token are named."""
    logits = (3 * torch.randn(8, 1500, generator=torch.Generator().manual_seed(3))).to(DEVICE)
    logits[4, 1300], logits[5] = torch.nan, -torch.inf
    logits[6] = -torch.inf
    logits[6, 7] = torch.nan
    logits[7, [3, 1400]] = torch.inf
    before = logits.clone()
    temperature, seeds, _ = parameters(5)
    slots = torch.tensor([2, 4, 2, 0, 1, 3, 4, 0], device=DEVICE)
    positions = torch.tensor([9, 4, 10, 3, 7, 8, 8, 1], device=DEVICE)
    expected = reference.sample(logits, temperature[slots], seeds[slots], positions + 1)
    sound = [0, 1, 2, 3, 7]
    for backend in (sampling, ReferenceKernels()):
        keys = backend.token_keys(logits, temperature, seeds, rows_at(slots, positions))
        best = keys.amax(dim=1)
        assert has_nan(best).nonzero().flatten().tolist() == [4, 6]
        assert has_no_valid_token(best).nonzero().flatten().tolist() == [5]
        assert torch.equal(token_of(best)[sound], expected[sound])
        assert ((token_of(best) >= 0) & (token_of(best) < 1500)).all()
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
