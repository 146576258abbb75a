"""Suffix search in Triton equals the reference, in memory full of traps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.compiled import compile_launches
from helpers.suffixes import Options, earlier
from sametoken.ops.lookup import suffix as reference
from sametoken.ops.lookup import suffix_triton
from sametoken.ops.lookup.suffix import Earlier
from sametoken.ops.lookup.suffix_triton import search

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(token_ids, slots, lengths, texts: Earlier, options: Options) -> torch.Tensor:
    expected = reference.search(token_ids, slots, lengths, earlier=texts, limits=options.tables())
    actual = search(
        token_ids.to(DEVICE),
        slots.to(DEVICE),
        lengths.to(DEVICE),
        earlier=Earlier(texts.texts.to(DEVICE), texts.lengths.to(DEVICE)),
        limits=options.tables(DEVICE),
    )
    assert torch.equal(actual[1].cpu(), expected[1])
    assert torch.equal(actual[0].cpu(), expected[0])
    return expected[1]


@settings(max_examples=24)
@given(st.data())
def test_small_alphabets(data):
    """Two letters make every kind of overlap; garbage above the end would extend matches.

    Rows are ranked together, or one after the other for want of memory.
    """
    max_len, width = data.draw(st.integers(3, 50)), data.draw(st.integers(1, 50))
    num_texts = data.draw(st.sampled_from([0, 1, 3]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))

    def draw(most, *shape):
        return torch.randint(0, most + 1, shape, generator=generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_triton, "_MOST_BYTES", data.draw(st.sampled_from([1, 2**28])))
        check(
            draw(1, 3, max_len),
            torch.tensor(data.draw(st.permutations(range(3)))),
            draw(max_len, 3),
            Earlier(draw(1, num_texts, width), draw(width, num_texts)),
            Options(
                data.draw(st.integers(1, 9)),
                data.draw(st.integers(1, 6)),
                data.draw(st.integers(1, 3)),
                data.draw(st.sampled_from([0.5, 1.0, 3.0])),
                data.draw(st.sampled_from([0.0, 0.3, 1.0])),
            ),
        )


@pytest.mark.parametrize("where", [3, 1018, 1023, 1024, 2040])
@pytest.mark.parametrize("text", ["own", "earlier"])
def test_matches_across_tiles(where, text):
    """The only match lies in, or straddles, one of three tiles."""
    tokens, others = torch.arange(10, 2310).repeat(2, 1), torch.arange(5000, 7200).repeat(2, 1)
    source = tokens if text == "own" else others
    tokens[1, 2095:2100] = source[1, where : where + 5]
    count = check(
        tokens,
        torch.tensor([1, 0]),
        torch.tensor([2100, 2100]),
        Earlier(others, torch.tensor([0, 2200])),
        Options(4, min_match=2),
    )
    assert count.tolist() == [4, 0]


def test_padding_finds_nothing():
    tokens = torch.full((2, 64), 5)
    slots, lengths = torch.tensor([1, 0]), torch.tensor([0, 1])
    assert check(tokens, slots, lengths, earlier([], 8, 5), Options(3)).tolist() == [0, 0]
    texts = earlier([[5, 5, 5, 5]], 8, 5)
    assert check(tokens, slots, lengths, texts, Options(3)).tolist() == [0, 1]


def test_a_gpu_has_room_for_the_tiles_of_very_many_texts(tmp_path):
    code = """
from sametoken.ops.lookup.suffix import Earlier, Limits
from sametoken.ops.lookup.suffix_triton import search

def zeros(*shape):
    return torch.zeros(shape, dtype=torch.int64)

limits = Limits.of(
    2, depth=3, min_match=1, factor=1.0, min_prob=0.0, device=torch.device("cpu")
)
texts = Earlier(zeros(70_000, 4), zeros(70_000))
search(zeros(1, 8), zeros(1), zeros(1), earlier=texts, limits=limits)
"""
    compile_launches(code, tmp_path)
