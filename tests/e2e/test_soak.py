"""A real server under requests that are cut short at random: right, empty at the end, small.

``SAMETOKEN_SOAK_REQUESTS`` sets their number; ``benchmarks/soak.py`` runs 10,000 of any model.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from helpers.chat_model import write_chat_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_REQUESTS = int(os.environ.get("SAMETOKEN_SOAK_REQUESTS", "400"))


@pytest.fixture(scope="module")
def soak():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("soak")
    del sys.modules["soak"], sys.modules["soak_requests"]


def test_every_request_is_answered_as_offline_and_memory_stays_flat(soak, tmp_path):
    model = write_chat_model(tmp_path / "model")
    soaked = soak.soak(str(model), NUM_REQUESTS, concurrency=32)
    assert soaked.wrong == []
    assert soaked.no_beginning == []
    assert soaked.failed == []
    assert not any(soaked.left.values())
    assert soaked.is_right
    assert soaked.fates.total() == NUM_REQUESTS + soak.NUM_LONG
    assert soaked.fates["whole"] + soaked.fates["streamed"] > NUM_REQUESTS // 3
    assert soaked.fates["refused"] > 0
    assert soaked.fates["left in mid-stream"] > 0
    assert soaked.fates["left before the first token"] > 0
    assert soaked.num_met == soak.NUM_LONG
    assert soaked.counted["shadow_audits_total"] > 0
    # A leak of requests' objects is more. The serving process is warm after 2,000 requests only.
    assert soaked.growth_mib["engine_mib"] < 8


def test_the_soak_finds_wrong_answers(soak):
    """What it is there for: an answer that differs is named."""
    case = soak.Case("/v1/completions", {}, (1, 2, 4), "abd")
    soaked = soak.Soaked()
    for name, token_ids, text, is_whole in (
        ("right", [1, 2, 4], "abd", True),
        ("beginning", [1, 2], "ab", False),
        ("other token", [1, 2, 3], "abd", True),
        ("other text", [1, 2, 4], "abc", True),
        ("too short", [1, 2], "ab", True),
        ("cut", [1, 5], "a", False),
        ("cut text", [1], "b", False),
    ):
        soaked.judge(name, case, soak.Answer(token_ids, text, is_whole))
    assert soaked.wrong == ["other token", "other text", "too short"]
    assert soaked.no_beginning == ["other token", "other text", "cut", "cut text"]


def test_the_soak_finds_what_else_went_wrong(soak):
    counted = dict.fromkeys(soak.HARM, 0.0) | {soak.ACCEPTED: 5.0}
    right = {"left": {"num_requests_running": 0.0}, "counted": counted, "exit_code": 0}
    assert soak.Soaked(**right).is_right
    for fault in (
        {"failed": ["3, whole: 500"]},
        {"left": {"num_requests_running": 1.0}},
        {"counted": counted | {"requests_failed_total": 1.0}},
        {"counted": counted | {soak.ACCEPTED: 0.0}},
        {"exit_code": None},
        {"exit_code": -9},
        {"num_tracebacks": 1},
    ):
        assert not soak.Soaked(**right | fault).is_right, fault


def test_growth_is_that_of_the_warm_state(soak):
    values = [10.0, 40.0, 50.0, 51.0, 55.0, 53.0, 52.0]
    soaked = soak.Soaked(samples=[{"server_mib": one, "engine_mib": 7.0} for one in values])
    soaked.weigh()
    assert soaked.growth_mib == {"server_mib": 5.0, "engine_mib": 0.0}


def test_pieces_of_an_answer_add_up(soak):
    answer = soak.Answer()
    answer.take({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    answer.take({"choices": [{"delta": {"content": "a"}, "token_ids": [1]}]})
    answer.take({"choices": [{"delta": {}, "token_ids": [2]}]})
    answer.take({"choices": [{"text": "b", "token_ids": [3]}]})
    answer.take({"choices": [{"message": {"content": "c"}, "token_ids": [4, 5]}]})
    assert (answer.text, answer.token_ids) == ("abc", [1, 2, 3, 4, 5])
