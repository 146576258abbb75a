"""Batches are a function of lengths, seed and step; draft rows are those an engine drafts from."""

from __future__ import annotations

import torch

from sametoken.train.batches import GRAIN, Batches, DraftRows
from sametoken.train.text import Sequences

CPU = torch.device("cpu")


def sequences_of(lengths):
    pairs, first = [], 0
    for length in lengths:
        pairs.append((list(range(first, first + length)), 1))
        first += length
    return Sequences.of(pairs)


def batches_of(sequences, indices, batch_tokens=128, seed=3):
    return Batches(sequences, indices, batch_tokens=batch_tokens, seed=seed, device=CPU)


def test_an_epoch_holds_every_chosen_sequence_once_within_the_budget():
    sequences = sequences_of([3, 40, 31, 33, 64, 5, 70, 3])
    indices = [0, 1, 2, 4, 5, 6]
    batches = batches_of(sequences, indices)
    for epoch in range(3):
        seen = []
        for step in range(len(batches)):
            batch = batches.at(epoch * len(batches) + step)
            assert batch.places.shape[1] % GRAIN == 0
            assert batch.places.numel() <= 128
            for ids, length in zip(batch.token_ids.tolist(), batch.lengths.tolist(), strict=True):
                found = [i for i in indices if sequences.sequence(i)[0] == ids[0]]
                assert ids[:length] == sequences.sequence(found[0]).tolist()
                assert set(ids[length:]) <= {ids[length - 1]}
                seen += found
        assert sorted(seen) == indices


def test_epochs_differ_seeds_differ_and_nothing_else_matters():
    sequences = sequences_of([4] * 40)
    everything = list(range(40))

    def order(seed, epoch):
        batches = batches_of(sequences, everything, seed=seed)
        steps = range(epoch * len(batches), (epoch + 1) * len(batches))
        return torch.cat([batches.at(step).places[:, 0] for step in steps]).tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    # Whatever was asked before.
    batches = batches_of(sequences, everything, seed=1)
    late = batches.at(3 * len(batches)).places
    _ = batches.at(0)
    assert torch.equal(batches.at(3 * len(batches)).places, late)


def test_a_sequence_longer_than_the_budget_is_alone():
    batches = batches_of(sequences_of([100, 100]), [0, 1], batch_tokens=32)
    assert [batches.at(i).places.shape[0] for i in range(2)] == [1, 1]


def test_draft_rows_begin_at_the_first_step_after_the_prompt():
    sequences = Sequences.of(
        [(list(range(7)), 3), ([0, 1], 0), (list(range(5)), 0), ([1, 2, 3], 1)]
    )
    batch = batches_of(sequences, [0, 1, 2, 3]).of(torch.tensor([0, 1, 2, 3]))
    rows = DraftRows.of(batch)
    width = batch.places.shape[1]
    # Row r drafts tokens r + 2 .. : of 7 tokens with a prompt of 3 that is from row 2 to 4.
    assert rows.flat.tolist() == [2, 3, 4, 2 * width, 2 * width + 1, 2 * width + 2, 3 * width]
    assert rows.left.tolist() == [3, 2, 1, 3, 2, 1, 1]
    assert rows.counts == [3, 0, 3, 1]
