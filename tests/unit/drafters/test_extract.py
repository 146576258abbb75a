"""What is recorded of a step: its committed rows, no rejected ones, and another's drafts."""

from __future__ import annotations

import pytest
import torch

from helpers.drafting import Bench, requests_of
from helpers.lookups import ngram_drafter
from helpers.toy import ToyModel
from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import NoDrafter
from sametoken.drafters.extract import CommittedRows, ExtractDrafter, extracted_layers
from sametoken.errors import ConfigError
from sametoken.types.speculative_methods import EXTRACT

VOCAB = 3


class Sink:
    def __init__(self) -> None:
        self.steps: list[CommittedRows] = []

    def put(self, rows: CommittedRows) -> None:
        self.steps.append(rows)


def recorded_rows(context, hashed, tokens):
    """Slot, position, token, next token and state of every committed row, from the lengths."""
    for b, slot in requests_of(context):
        for position in range(int(context.x.num_computed[b]), int(context.end[b])):
            known = tokens(slot)
            state = (float(hashed(known[: position + 1])), 1.0)
            yield slot, position, known[position], known[position + 1], state


@pytest.mark.parametrize("k", [1, 4])
def test_rows_are_the_committed_ones_whatever_was_drafted(k):
    target, sink = ToyModel(VOCAB), Sink()
    bench = Bench(target, k, seed=k)
    inner = ngram_drafter(k)
    bench.drafter = ExtractDrafter(inner, sink)
    num_left_out = 0

    def check(context, drafts):
        nonlocal num_left_out
        rows, x = sink.steps[-1], context.x
        assert rows.step_ids.tolist() == [bench.step_id] * len(context.slots)
        columns = (rows.slots, rows.positions, rows.token_ids, rows.next_token_ids)
        states = (tuple(state) for state in rows.states.tolist())
        found = zip(*(column.tolist() for column in columns), states, strict=True)
        wanted = list(recorded_rows(context, target._hash, bench.tokens))
        assert [row for row in found if row[0] < bench.num_slots] == wanted
        num_left_out += int((x.num_computed + x.num_query + x.num_drafts - context.end).sum())
        own = inner.propose(context)
        assert torch.equal(own.draft_ids, drafts.draft_ids)
        assert torch.equal(own.num_drafts, drafts.num_drafts)

    bench.run(40, VOCAB, check)
    assert num_left_out > 20
    assert len(sink.steps) == bench.step_id


def test_it_is_to_the_engine_what_the_inner_drafter_is():
    class Inner(NoDrafter):
        kv_caches = ("a cache",)
        lookahead_slots = 3
        lookahead_tokens = 1

    drafter = ExtractDrafter(Inner(), Sink())
    assert drafter.kv_caches == Inner.kv_caches
    assert (drafter.lookahead_slots, drafter.lookahead_tokens) == (3, 1)


def spec(layers=None) -> SpeculativeConfig:
    return SpeculativeConfig(
        EXTRACT, shared_storage_path="somewhere", eagle_aux_hidden_state_layer_ids=layers
    )


def test_layers_are_those_of_eagle3_or_those_asked_for():
    assert extracted_layers(spec(), 32) == (2, 16, 29)
    assert extracted_layers(spec((4, 0, 4)), 4) == (4, 0, 4)


@pytest.mark.parametrize(("layers", "num_layers"), [((1, 5), 4), (None, 2)])
def test_layers_that_are_not_there_are_refused(layers, num_layers):
    with pytest.raises(ConfigError, match=f"the model has {num_layers} layers"):
        extracted_layers(spec(layers), num_layers)
