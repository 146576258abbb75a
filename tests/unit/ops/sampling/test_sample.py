from __future__ import annotations

import math

import pytest
import torch

from sametoken.ops.sampling import sample as reference
from sametoken.ops.sampling.sample import gumbel_noise, philox, sample

# Random123's tests/kat_vectors, lines "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(word) for word in words) == expected


def plain_philox(counter, key):
    """Philox4x32-10 in Python integers, as the paper writes it."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 17, 2**31 + 3, 2**33 + 1])
def test_noise_follows_its_specification_word_by_word(seed, position):
    vocab_size = 11
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), vocab_size)[0]
    for token_id in range(vocab_size):
        counter = (token_id // 4, position % 2**32, position >> 32, 0)
        word = plain_philox(counter, (seed % 2**32, seed >> 32))[token_id % 4]
        v = min(word * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
        assert noise[token_id].item() == pytest.approx(-math.log(-math.log1p(-v)), rel=2e-5)


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(torch.arange(40), torch.arange(40) * 7, 10_000).flatten().double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    ordered = noise.sort().values
    size = ordered.shape[0]
    expected = torch.exp(-torch.exp(-ordered))
    distance = (expected - torch.arange(size) / size).abs().max().item()
    assert distance * math.sqrt(size) < 1.95  # Kolmogorov-Smirnov, p = 0.001


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 128, 2**32 - 1])
def test_noise_is_finite_at_the_ends_of_the_generator(word, monkeypatch):
    words = tuple(torch.full((1, 2), word) for _ in range(4))
    monkeypatch.setattr(reference, "philox", lambda counter, key: words)
    noise = gumbel_noise(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 8)
    assert noise.isfinite().all()


def test_seeds_positions_and_tokens_all_change_the_noise():
    seeds, positions = torch.tensor([1, 2, 1]), torch.tensor([5, 5, 6])
    noise = gumbel_noise(seeds, positions, 16)
    assert len(set(noise.flatten().tolist())) == 3 * 16


def random_rows(count, vocab_size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, vocab_size, generator=generator) * 3
    temperature = torch.tensor([(0.0, 0.3, 1.0, 2.5)[i % 4] for i in range(count)])
    return logits, temperature, torch.arange(count) * 977, torch.arange(count) * 13


@pytest.mark.parametrize("vocab_size", [1, 3, 8, 1001, 49155])
def test_a_row_has_the_same_token_alone_and_in_any_company(vocab_size):
    arguments = random_rows(41, vocab_size)
    together = sample(*arguments)
    for row in (0, 1, 2, 17, 40):
        assert torch.equal(sample(*(a[row : row + 1] for a in arguments)), together[[row]])
    order = torch.randperm(41, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(*(a[order] for a in arguments)), together[order])


@pytest.mark.parametrize("vocab_size", [7, 1001, 49155])
def test_noise_has_the_same_bits_alone_and_in_any_company(vocab_size):
    seeds, positions = torch.arange(9) * 31, torch.arange(9) * 5
    together = gumbel_noise(seeds, positions, vocab_size)
    for row in range(9):
        alone = gumbel_noise(seeds[[row]], positions[[row]], vocab_size)
        assert torch.equal(alone, together[[row]])
    assert torch.equal(gumbel_noise(seeds, positions, vocab_size - 2), together[:, :-2])


def test_sample_is_the_argmax_of_scaled_logits_and_noise():
    logits, temperature, seeds, positions = random_rows(40, 50)
    tokens = sample(logits, temperature, seeds, positions)
    noise = gumbel_noise(seeds, positions, 50)
    for row in range(40):
        values = logits[row]
        if temperature[row] > 0:
            values = values / temperature[row] + noise[row]
        values = values.tolist()
        assert tokens[row] == values.index(max(values))
    assert not torch.equal(tokens, logits.argmax(-1))


def test_equal_values_give_the_lowest_id(monkeypatch):
    monkeypatch.setattr(
        reference, "gumbel_noise", lambda seeds, positions, size: torch.zeros(len(seeds), size)
    )
    logits = torch.zeros(2, 4000)
    logits[:, [1234, 77, 3999]] = 2.0
    zero = torch.zeros(2, dtype=torch.int64)
    rows = torch.tensor([0.0, 1.0]), zero, zero
    assert sample(logits, *rows).tolist() == [77, 77]
    logits, token_ids = torch.tensor([[1.0, 2.0, 0.0, 2.0]] * 2), torch.tensor([3, 10, 11, 90])
    assert sample(logits, *rows, token_ids).tolist() == [10, 10]


@pytest.mark.parametrize(("columns", "vocab_size"), [(1, 9), (7, 8), (40, 40), (501, 4099)])
def test_mapped_columns_choose_what_the_whole_vocabulary_chooses(columns, vocab_size):
    logits, temperature, seeds, positions = random_rows(41, columns)
    logits[20:] = logits[20:].round()
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(columns))
    token_ids = order[:columns].sort().values
    full = torch.full((41, vocab_size), -math.inf)
    full[:, token_ids] = logits
    found = sample(logits, temperature, seeds, positions, token_ids)
    assert torch.equal(found, sample(full, temperature, seeds, positions))


def test_greedy_rows_make_no_noise_and_logits_are_not_written(monkeypatch):
    logits, _, seeds, positions = random_rows(6, 30)
    before = logits.clone()
    sample(logits, torch.full((6,), 0.7), seeds, positions)
    assert torch.equal(logits, before)
    monkeypatch.setattr(reference, "gumbel_noise", None)
    assert torch.equal(sample(logits, torch.zeros(6), seeds, positions), logits.argmax(-1))


def test_masked_and_poisoned_rows_give_valid_ids():
    logits = torch.full((3, 10), -math.inf)
    logits[1, 4] = math.nan
    logits[2, 9] = 0.5
    for temperature in (torch.zeros(3), torch.ones(3)):
        tokens = sample(logits, temperature, torch.arange(3), torch.arange(3))
        assert ((tokens >= 0) & (tokens < 10)).all()
        assert tokens[2] == 9


def test_no_rows_is_no_tokens():
    none = torch.zeros(0, dtype=torch.int64)
    assert sample(torch.zeros(0, 8), torch.zeros(0), none, none).shape == (0,)
