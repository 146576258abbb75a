import pytest
import torch

from sametoken.core.plan import Admission
from sametoken.core.sampling_params import SamplingParams
from sametoken.errors import InvariantError
from sametoken.state.sampling import SamplingTable


def snapshot(table, slot):
    columns = ("temperature", "seed", "top_k", "top_p", "min_p")
    columns += ("num_logprobs", "num_prompt_logprobs")
    return [getattr(table, name)[slot].item() for name in columns]


@pytest.fixture
def table():
    return SamplingTable.allocate(3, torch.device("cpu"))


def test_slots_are_one_more_than_requests_and_start_greedy(table):
    assert table.temperature.shape == (4,)
    assert all(snapshot(table, slot) == [0.0, 0, 0, 1.0, 0.0, -1, -1] for slot in range(4))


def test_admission_sets_one_slot_alone(table):
    params = SamplingParams(
        temperature=0.5, seed=2**63 - 1, top_k=7, top_p=0.9, min_p=0.1, logprobs=0,
        prompt_logprobs=4,
    )  # fmt: skip
    table.admit(Admission(1, (5,), 0, params))
    assert snapshot(table, 1) == [0.5, 2**63 - 1, 7, 0.9, 0.1, 0, 4]
    assert all(snapshot(table, slot) == [0.0, 0, 0, 1.0, 0.0, -1, -1] for slot in (0, 2, 3))
    assert not table.rules


def test_admission_replaces_everything_of_the_former_request(table):
    former = SamplingParams(
        temperature=0.5, seed=9, top_k=7, top_p=0.9, min_p=0.1, logprobs=1, prompt_logprobs=1,
        frequency_penalty=1.0,
    )  # fmt: skip
    table.admit(Admission(2, (5,), 0, former))
    assert 2 in table.rules
    table.admit(Admission(2, (5,), 0, SamplingParams(temperature=0.0)))
    assert snapshot(table, 2) == [0.0, 0, 0, 1.0, 0.0, -1, -1]
    assert not table.rules


def test_min_tokens_without_stop_ids_is_no_rule(table):
    table.admit(Admission(0, (5,), 0, SamplingParams(temperature=0.0, min_tokens=3)))
    assert not table.rules


def test_a_temperature_too_small_to_divide_by_is_greedy(table):
    table.admit(Admission(0, (5,), 0, SamplingParams(temperature=1e-6)))
    assert table.temperature[0] == 0.0


def test_sampling_without_a_seed_is_refused(table):
    with pytest.raises(InvariantError, match="no seed"):
        table.admit(Admission(0, (5,), 0, SamplingParams(temperature=1.0)))
