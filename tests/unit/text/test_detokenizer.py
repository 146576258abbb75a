"""Streamed pieces put together are the decoding of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from sametoken.models.names import resolve_model
from sametoken.text.detokenizer import ByteLevelDetokenizer, WindowDetokenizer, make_detokenizer
from sametoken.text.tokenizer import Tokenizer, load_tokenizer

IDS = st.lists(st.integers(0, 335), max_size=24)


@pytest.fixture(scope="module")
def spaced() -> Tokenizer:
    """A tokenizer in the form of Llama 2: spaces as U+2581, unknown bytes as <0xXX>."""
    words = ["<unk>", "<s>", "▁the", "▁", "cat", "▁cat", "s", "é", "�", "<0x0A>"]
    words += [f"<0x{byte:02X}>" for byte in (0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0xFF)]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def pieces(tokenizer, token_ids, skip, prompt=()):
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip, prompt=prompt)
    return [*(detokenizer.append(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.fixture(scope="module")
def wrapped(tokenizer) -> Tokenizer:
    """A byte-level tokenizer whose decoder has another step."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


#: Bytes that begin, continue and end characters, a letter, and an id beyond the vocabulary.
CUT = [*"ðŁĲ±âĤ¬Ãa", 10**6]


@settings(max_examples=300)
@given(chosen=st.lists(st.sampled_from(CUT), max_size=24))
def test_pieces_of_cut_characters_make_the_whole(tokenizer, wrapped, chosen):
    find = tokenizer.backend.token_to_id
    token_ids = [find(one) if isinstance(one, str) else one for one in chosen]
    assert "".join(pieces(wrapped, token_ids, True)) == wrapped.decode(token_ids)
    # An unknown id has no text, and no place of its own.
    known = [token_id for token_id in token_ids if token_id < 10**6]
    assert starts(wrapped, known) == starts(tokenizer, known)


def test_broken_bytes_are_not_decoded_again_and_again(tokenizer, wrapped, monkeypatch):
    decode, sizes = wrapped.decode, []

    def counted(token_ids, **options):
        sizes.append(len(token_ids))
        return decode(token_ids, **options)

    monkeypatch.setattr(wrapped, "decode", counted)
    for stand_in in "±ð":
        whole = "".join(pieces(wrapped, [tokenizer.backend.token_to_id(stand_in)] * 500, True))
        assert whole == "\ufffd" * 500
    assert max(sizes) <= 4


@settings(max_examples=150)
@given(token_ids=IDS, skip=st.booleans())
def test_byte_level_pieces_make_the_whole(tokenizer, token_ids, skip):
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, token_ids, skip)) == whole


@settings(max_examples=150)
@given(token_ids=st.lists(st.integers(0, 16), max_size=16), skip=st.booleans())
def test_byte_fallback_pieces_make_the_whole(spaced, token_ids, skip):
    whole = spaced.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(spaced, token_ids, skip)) == whole


@settings(max_examples=150)
@given(
    token_ids=st.lists(st.integers(0, 16), max_size=16),
    prompt=st.lists(st.integers(0, 16), max_size=4),
    last=st.sampled_from([2, 3, 4, 5, 6]),
    skip=st.booleans(),
)
def test_pieces_follow_the_text_of_their_prompt(spaced, token_ids, prompt, last, skip):
    prompt.append(last)
    before = spaced.decode(prompt, skip_special_tokens=skip)
    whole = spaced.decode([*prompt, *token_ids], skip_special_tokens=skip)
    assert before + "".join(pieces(spaced, token_ids, skip, prompt)) == whole


def test_a_prompt_that_ends_in_bytes_or_special_tokens_keeps_the_space_after_it(spaced):
    for prompt in ([2, 9], [2, *[10, 11, 12] * 30], [2, 1], [2, 9, 1], [2, 14]):
        assert pieces(spaced, [5, 9], True, prompt) == [" cat", "", "\n"], prompt
    assert pieces(spaced, [5], True, [1]) == ["cat", ""]
    # One that is shown is before the space too.
    assert pieces(spaced, [5], False, [1]) == [" cat", ""]
    assert pieces(spaced, [14], True, [2, 13]) == ["", "\ufffd"]


def test_each_kind_of_decoder_gets_its_detokenizer(tokenizer, spaced):
    byte_level = make_detokenizer(tokenizer, skip_special_tokens=True)
    window = make_detokenizer(spaced, skip_special_tokens=True)
    assert isinstance(byte_level, ByteLevelDetokenizer)
    assert isinstance(window, WindowDetokenizer)


def test_a_character_comes_with_its_last_byte(tokenizer):
    token_ids = [tokenizer.backend.token_to_id(stand_in) for stand_in in "ðŁĲ±"]
    assert pieces(tokenizer, token_ids, True) == ["", "", "", "🐱", ""]
    assert pieces(tokenizer, token_ids[:3], True) == ["", "", "", "\ufffd"]


def test_text_is_not_held_back_without_need(tokenizer, spaced):
    token_ids = tokenizer.encode("the cat sat")
    assert pieces(tokenizer, token_ids, True)[:-1] == [tokenizer.decode([i]) for i in token_ids]
    assert pieces(spaced, [2, 5, 5], True) == ["the", " cat", " cat", ""]


def test_special_tokens_are_skipped_or_written_out(tokenizer):
    token_ids = tokenizer.encode("the<|end|><plain token>")
    assert "".join(pieces(tokenizer, token_ids, True)) == "the<plain token>"
    assert "".join(pieces(tokenizer, token_ids, False)) == "the<|end|><plain token>"


@pytest.mark.network
@settings(max_examples=120)
@given(token_ids=st.lists(st.integers(0, 49_200), max_size=40), skip=st.booleans())
def test_pieces_of_the_embedded_model_make_the_whole(embedded, token_ids, skip):
    whole = embedded.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(embedded, token_ids, skip)) == whole


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2", lambda line: None))


def test_whole_characters_of_a_run_of_bytes_are_known_before_it_ends(spaced):
    detokenizer = make_detokenizer(spaced, skip_special_tokens=True)
    line, euro, invalid = 9, (10, 11, 12), 15
    held = []
    for token_id in (line, *euro, invalid, line):
        detokenizer.append(token_id)
        held.append(detokenizer.held)
    assert held == ["\n", "", "", "\n€", "", ""]
    detokenizer.append(4)
    assert detokenizer.held == ""


def test_replacement_characters_that_are_tokens_do_not_wait_for_others(spaced):
    assert pieces(spaced, [4, 8, 8, 4], True) == ["cat", "�", "�", "cat", ""]


def starts(tokenizer, token_ids: list[int]) -> list[int]:
    """Where the text of each token begins."""
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=True)
    found, size = [], 0
    for token_id in token_ids:
        piece = detokenizer.append(token_id)
        found.append(size + detokenizer.num_before)
        size += len(piece)
    return found


@pytest.mark.parametrize(
    ("stand_ins", "expected"),
    [
        ("ðŁĲ±a", [0, 0, 0, 0, 1]),
        ("ðŁĲab", [0, 0, 0, 1, 2]),
        ("ðŁðŁa", [0, 0, 1, 1, 2]),
        ("±a±b", [0, 1, 2, 3]),
        ("ï¿½a", [0, 0, 0, 1]),
    ],
)
def test_a_token_begins_behind_the_broken_bytes_before_it(tokenizer, stand_ins, expected):
    token_ids = [tokenizer.backend.token_to_id(stand_in) for stand_in in stand_ins]
    assert starts(tokenizer, token_ids) == expected


def test_a_token_begins_behind_the_run_of_bytes_before_it(spaced):
    line, euro, invalid, cat = 9, [10, 11, 12], 15, 4
    assert starts(spaced, [cat, *euro, line, cat, cat]) == [0, 3, 3, 3, 3, 5, 8]
    assert starts(spaced, [cat, *euro[:2], invalid, cat]) == [0, 3, 3, 3, 6]
