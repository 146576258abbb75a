from __future__ import annotations

import pytest
import torch

from sametoken.errors import InvariantError
from sametoken.ops.step.reference import write_tables
from sametoken.state.sampling import SamplingTable
from sametoken.types.plan import Admission
from sametoken.types.sampling_params import SamplingParams


def rules_of(table, slot):
    """Masks, biases and penalties of a slot, from the host's side and the device's."""
    rules = table.rules
    columns = (rules.counter_of, rules.repetition, rules.frequency, rules.presence)
    edits = rules.edits.get(slot)
    assert rules.edit_addresses[slot] == (0 if edits is None else edits.data_ptr())
    assert rules.counter_of[slot] == rules.counters.get(slot, -1)
    return [edits is not None, *(column[slot].item() for column in columns)]


NO_RULES = [False, -1, 1.0, 0.0, 0.0]
FREE = [0.0, 1.0, 0, 0, 1.0, 0.0, None, None]


def snapshot(table, slot):
    columns = ("temperature", "prompt_temperature", "seed", "top_k", "top_p", "min_p")
    asked = (table.num_logprobs.get(slot), table.num_prompt_logprobs.get(slot))
    return [*(getattr(table, name)[slot].item() for name in columns), *asked]


@pytest.fixture
def table():
    return SamplingTable.allocate(3, torch.device("cpu"))


def test_slots_are_one_more_than_requests_and_start_greedy(table):
    assert table.temperature.shape == (4,)
    assert all(snapshot(table, slot) == FREE for slot in range(4))


def test_admission_sets_one_slot_alone(table):
    params = SamplingParams(
        temperature=0.5, seed=2**63 - 1, top_k=7, top_p=0.9, min_p=0.1, logprobs=0,
        prompt_logprobs=4,
    )  # fmt: skip
    write_tables(table.admit(Admission(1, (5,), 0, params, prompt_temperature=4.0)))
    assert snapshot(table, 1) == [0.5, 4.0, 2**63 - 1, 7, 0.9, 0.1, 0, 4]
    assert all(snapshot(table, slot) == FREE for slot in (0, 2, 3))
    assert all(rules_of(table, slot) == NO_RULES for slot in range(4))


def test_admission_replaces_everything_of_the_former_request(table):
    former = SamplingParams(
        temperature=0.5, seed=9, top_k=7, top_p=0.9, min_p=0.1, logprobs=1, prompt_logprobs=1,
        frequency_penalty=1.0, presence_penalty=-0.5, repetition_penalty=2.0, logit_bias={4: 1.0},
    )  # fmt: skip
    write_tables(table.admit(Admission(2, (5,), 0, former, prompt_temperature=4.0)))
    assert rules_of(table, 2) == [True, 0, 2.0, 1.0, -0.5]
    write_tables(table.admit(Admission(2, (5,), 0, SamplingParams(temperature=0.0))))
    assert snapshot(table, 2) == FREE
    assert rules_of(table, 2) == NO_RULES


def test_counters_are_as_few_as_the_slots_that_count(table):
    counting, plain = SamplingParams(temperature=0.0, presence_penalty=1.0), SamplingParams(seed=1)
    for slot, params in [(2, counting), (0, counting), (2, plain), (1, counting), (0, counting)]:
        write_tables(table.admit(Admission(slot, (5,), 0, params)))
    assert table.rules.counters == {1: 0, 0: 1}
    assert table.rules.counter_of.tolist() == [1, 0, -1, -1]


def test_masks_that_forbid_every_token_are_refused(table):
    params = SamplingParams(temperature=0.0, allowed_token_ids=[3], min_tokens=2)
    with pytest.raises(InvariantError, match="forbid every token"):
        write_tables(table.admit(Admission(1, (5,), 0, params, stop_token_ids=(3,))))


def test_min_tokens_without_stop_ids_is_no_rule(table):
    write_tables(table.admit(Admission(0, (5,), 0, SamplingParams(temperature=0.0, min_tokens=3))))
    assert rules_of(table, 0) == NO_RULES


def test_a_temperature_too_small_to_divide_by_is_greedy(table):
    write_tables(table.admit(Admission(0, (5,), 0, SamplingParams(temperature=1e-6))))
    assert table.temperature[0] == 0.0


def test_sampling_without_a_seed_is_refused(table):
    with pytest.raises(InvariantError, match="no seed"):
        write_tables(table.admit(Admission(0, (5,), 0, SamplingParams(temperature=1.0))))
