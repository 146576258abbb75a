"""Outputs that share the storage of a completion that grows."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sametoken.types.growing import Beginning, GrowingText
from sametoken.types.outputs import CompletionOutput, Logprob


class Growing:
    """A completion that grows by pieces, one per token."""

    def __init__(self) -> None:
        self.text = GrowingText()
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.starts: list[int] = []

    def add(self, piece: str) -> CompletionOutput:
        self.starts.append(len(self.text))
        self.text.append(piece)
        self.token_ids.append(len(piece))
        self.logprobs.append({len(piece): Logprob(-1.0, 1)})
        beginning = Beginning(
            self.text,
            len(self.text),
            self.token_ids,
            len(self.token_ids),
            self.logprobs,
            self.starts,
        )
        return CompletionOutput.of(beginning, 3, finish_reason=None, stop_reason="x")


def whole(pieces: list[str]) -> CompletionOutput:
    ids = tuple(map(len, pieces))
    logprobs = tuple({one: Logprob(-1.0, 1)} for one in ids)
    return CompletionOutput(3, "".join(pieces), ids, stop_reason="x", logprobs=logprobs)


@given(st.lists(st.text(max_size=3)), st.integers(0, 12), st.integers(0, 12))
def test_an_output_is_that_of_its_step_whatever_follows(pieces, start, first):
    growing = Growing()
    outputs = [growing.add(piece) for piece in pieces]
    for number, output in enumerate(outputs, 1):
        expected = whole(pieces[:number])
        assert (output.num_tokens, output.num_characters) == (number, len(expected.text))
        assert output.text_from(start) == expected.text[start:]
        assert output.token_ids_from(first) == expected.token_ids[first:]
        assert output.logprobs_from(first) == expected.logprobs[first:]
        assert output.has_logprobs
        assert output.pieces_from(0, 0) == pieces[:number]
        assert output == expected
        # One that is whole has the same parts, except that its tokens do not part its text.
        assert expected.text_from(start) == expected.text[start:]
        assert expected.token_ids_from(first) == expected.token_ids[first:]
        assert expected.logprobs_from(first) == expected.logprobs[first:]
        assert expected.pieces_from(first, start) == [expected.text[start:]]
        starts = [0, *[len(expected.text)] * number][:number]
        assert expected.starts_from(first) == starts[first:]
        assert repr(output) == repr(expected)
        assert type(output.token_ids) is tuple


def test_what_crosses_a_process_is_whole_and_alone():
    growing = Growing()
    output = growing.add("ab")
    growing.add("c" * 10_000)
    sent = pickle.dumps(output)
    assert len(sent) < 1000
    for other in (pickle.loads(sent), copy.deepcopy(output), dataclasses.replace(output)):
        assert other == output == whole(["ab"])
        assert other.text_from(1) == "b"
        assert other.num_tokens == 1
    assert dataclasses.replace(output, text="z").text_from(0) == "z"


def test_nothing_is_copied_until_it_is_read():
    growing = Growing()
    first, second = growing.add("ab"), growing.add("c")
    assert first._beginning.whole_token_ids is second._beginning.whole_token_ids
    assert first._beginning.whole_text is second._beginning.whole_text
    with pytest.raises(AttributeError):
        object.__getattribute__(first, "token_ids")
    assert first.token_ids is first.token_ids
    with pytest.raises(AttributeError, match="no attribute 'tokens'"):
        _ = first.tokens
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.text = "z"


def test_parts_of_a_text_without_logprobs():
    text = GrowingText()
    for piece in ("", "ab", "", "cde"):
        text.append(piece)
    assert len(text) == 5
    assert [text.part(1, 4), text.part(2, 2), text.part(4, 5), text.part(0, 5)] == [
        "bcd", "", "e", "abcde",
    ]  # fmt: skip
    output = CompletionOutput.of(Beginning(text, 4, [7, 8], 2, None, [2, 5]), 0)
    assert (output.text, output.logprobs, output.has_logprobs) == ("abcd", None, False)
    assert output.pieces_from(1, 1) == ["bcd"]
