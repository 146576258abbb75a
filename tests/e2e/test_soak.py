"""A served engine under requests that are cut short at random: right, empty at the end, small.

``SAMETOKEN_SOAK_REQUESTS`` sets their number; ``benchmarks/soak.py`` runs 10,000 of any model.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from helpers.checkpoints import write_llama
from sametoken.config import EngineConfig
from sametoken.core.outputs import CompletionOutput, RequestMetrics, RequestOutput

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"
NUM_REQUESTS = int(os.environ.get("SAMETOKEN_SOAK_REQUESTS", "400"))
#: What allocators may still gain after the warm state. A leak of a request's objects is more.
MAX_GROWTH_MIB = 8.0


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


def test_every_request_is_answered_as_offline_and_memory_stays_flat(soak, tmp_path):
    config = EngineConfig.from_options(
        model=str(write_llama(tmp_path / "model")),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=16,
        prefill_chunk_size=16,
        block_size=8,
        # Too few for 16 long requests: some are preempted.
        num_kv_blocks=60,
        steps_in_flight=2,
        device="cpu",
        speculative_config=soak.NGRAM,
    )
    soaked = soak.soak(config, NUM_REQUESTS, concurrency=48, max_tokens=24)
    assert soaked.wrong == []
    assert soaked.no_beginning == []
    assert (soaked.num_left, soaked.mismatched) == (0, 0)
    assert soaked.fates.total() == NUM_REQUESTS
    assert soaked.fates["length"] > NUM_REQUESTS // 2
    assert {"abort", "left", "cancelled", "dropped"} <= set(soaked.fates)
    assert soaked.audited > 0
    assert soaked.growth_mib < MAX_GROWTH_MIB


def test_the_soak_finds_wrong_answers(soak):
    """What it is there for: an answer that differs is named."""
    judged = soak.Soak(None, [], [], seed=0)
    completion = soak_output((1, 2, 3), "length")
    judged._judge("right", completion, (1, 2, 3))
    judged._judge("wrong", completion, (1, 2, 4))
    judged._judge("cut", soak_output((1, 5), "abort"), (1, 2, 4))
    assert judged.soaked.wrong == ["wrong"]
    assert judged.soaked.no_beginning == ["wrong", "cut"]
    assert not judged.soaked.is_right


def soak_output(token_ids, reason):
    completion = CompletionOutput(0, "", token_ids, reason)
    return RequestOutput("r", None, (), (completion,), True, RequestMetrics(0.0))
