"""Texts of earlier requests outlive their slots, whole and no further."""

from __future__ import annotations

import torch

from sametoken.state.commit import admit
from sametoken.state.sequences import NO_HISTORY, Sequences, TokenHistory
from sametoken.types.plan import Admission
from sametoken.types.sampling_params import SamplingParams

CPU = torch.device("cpu")
UNDEFINED = -7


def sequences(max_len: int = 8) -> Sequences:
    made = Sequences.allocate(
        max_num_seqs=3, max_len=max_len, num_drafts=1, block_size=4, reserved_block=0, device=CPU
    )
    made.token_ids.fill_(UNDEFINED)
    return made


def take(history: TokenHistory, held: Sequences, slot: int, prompt: tuple[int, ...]) -> None:
    history.keep(held, slot)
    admit(held, Admission(slot, prompt, 0, SamplingParams(temperature=0.0)))


def texts(history: TokenHistory) -> list[list[int]]:
    lengths = history.lengths.tolist()
    return [row[:n] for row, n in zip(history.texts.tolist(), lengths, strict=True)]


def test_a_text_is_kept_when_its_slot_is_taken_up_again():
    history, held = TokenHistory.allocate(2, 12, CPU), sequences()
    take(history, held, 1, (1, 2, 3))
    take(history, held, 0, (4,))
    assert texts(history) == [[], []]
    take(history, held, 1, (5, 6))
    assert texts(history) == [[1, 2, 3], []]
    take(history, held, 1, (7,))
    take(history, held, 0, (8,))
    assert texts(history) == [[4], [5, 6]]


def test_what_is_not_committed_lies_above_the_length():
    history, held = TokenHistory.allocate(1, 8, CPU), sequences()
    take(history, held, 2, (1, 2, 3))
    take(history, held, 2, (9,))
    assert texts(history) == [[1, 2, 3]]
    assert history.texts[0, 3:].tolist() == [UNDEFINED] * 5


def test_without_room_nothing_is_kept():
    held = sequences()
    take(NO_HISTORY, held, 0, (1,))
    take(NO_HISTORY, held, 0, (2,))
    assert NO_HISTORY.lengths.shape == (0,)
    assert not NO_HISTORY._used
