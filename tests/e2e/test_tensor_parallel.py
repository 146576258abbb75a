"""The law for two ranks: any drafter, chunks, company and steps in flight, the same tokens.

Ranks are threads here; tests/unit/distributed/test_ranks.py has them as processes.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from helpers.checkpoints import (
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_llama,
    write_safeailab,
)
from helpers.gguf_files import write_gguf
from helpers.recorded import RecordedLogits
from helpers.thread_ranks import engine_over_threads
from helpers.two_ranks import VOCAB, answer, config_of, drive, requests
from sametoken.engine.build import build_engine

SIZES = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    one_layer = SIZES | {"num_hidden_layers": 1}
    headless = head_tensors(full_vocab=True, **SIZES)
    del headless["lm_head.weight"]
    return {
        "target": write_llama(folder / "target", **SIZES),
        "other": write_llama(folder / "other", seed=9, **SIZES),
        "eagle": write_eagle1(folder / "eagle", eagle1_tensors(**SIZES), **one_layer),
        "eagle3": write_safeailab(folder / "eagle3", head_tensors(**SIZES), **one_layer),
        "headless": write_safeailab(folder / "headless", headless, **one_layer),
    }


def speculation(files, method):
    if method in ("self", "other"):
        path = files["target" if method == "self" else "other"]
        return {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    if method in ("eagle", "eagle3", "headless"):
        name = "eagle" if method == "eagle" else "eagle3"
        return {"method": name, "model": str(files[method]), "num_speculative_tokens": 2}
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    return None


@pytest.fixture(scope="module")
def truth(files):
    """Every request alone in its batch, plainly."""
    return answer(files["target"], max_num_seqs=1)


@pytest.mark.parametrize(
    ("method", "steps_in_flight", "max_num_seqs", "chunk"),
    [
        ("plain", 1, 6, 64),
        ("plain", 3, 3, 16),
        ("ngram", 2, 6, 32),
        ("self", 3, 6, 16),
        ("other", 2, 4, 32),
        ("eagle3", 1, 6, 16),
        ("eagle", 2, 3, 64),
    ],
)
def test_the_same_tokens(files, truth, method, steps_in_flight, max_num_seqs, chunk):
    answers = answer(
        files["target"],
        speculation(files, method),
        steps_in_flight=steps_in_flight,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=chunk,
    )
    assert answers == truth
    assert (answers.offered > 0) == (method != "plain")


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_the_same_tokens_of_a_gguf_file_in_its_bits(tmp_path, name):
    sizes = {"intermediate_size": 128, "max_position_embeddings": 256}
    path = write_gguf(tmp_path / "model.gguf", name, **sizes)
    packed = partial(answer, path, load_format="gguf-packed")
    wanted = packed(max_num_seqs=1)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    for speculation, steps_in_flight, max_num_seqs, chunk in (
        (drafts, 2, 6, 32),
        (None, 3, 3, 16),
    ):
        answers = packed(
            speculation,
            steps_in_flight=steps_in_flight,
            max_num_seqs=max_num_seqs,
            prefill_chunk_size=chunk,
        )
        assert answers == wanted
        assert (answers.offered > 0) == (speculation is not None)


def test_scarce_memory_and_preemption_change_nothing(files, truth):
    drafts = speculation(files, "self")
    config = config_of(files["target"], drafts, num_kv_blocks=10, max_num_seqs=6)
    with engine_over_threads(config) as (core, _):
        assert drive(core) == truth
        assert core._runner.num_swaps


def test_a_drafter_that_is_the_target_is_always_right(files):
    """It runs whole on rank 0, so its logits differ by rounding alone."""
    plain = [item for item in requests() if item.params.top_p == 1]
    answers = answer(files["target"], speculation(files, "self"), plain)
    assert answers.accepted == answers.offered > 0


@pytest.mark.parametrize("method", ["eagle", "eagle3", "headless"])
def test_a_head_is_right_as_often_as_with_one_rank(files, method):
    """It runs whole on rank 0, and shares what the target has divided."""
    options = speculation(files, method), list(requests())
    two = answer(files["target"], *options)
    one = answer(files["target"], *options, tensor_parallel_size=1)
    assert [tokens for tokens, _ in two.values()] == [tokens for tokens, _ in one.values()]
    assert (two.offered, two.accepted) == (one.offered, one.accepted)
    assert two.accepted > 0


def test_logits_are_near_those_of_one_rank_and_not_the_same(files):
    """The degree is part of the arithmetic: the law holds for each by itself."""
    rows = {}
    for size in (1, 2):
        config = config_of(files["target"], tensor_parallel_size=size)
        found = rows[size] = {}
        record = partial(_recorded, found)
        if size == 1:
            record(build_engine(config))
        else:
            with engine_over_threads(config) as (core, _):
                record(core)
    assert rows[1].keys() == rows[2].keys()
    differ = 0
    for where, row in rows[1].items():
        torch.testing.assert_close(rows[2][where], row, rtol=1e-4, atol=1e-4)
        differ += not torch.equal(rows[2][where], row)
    assert differ


def _recorded(found, core):
    """Raw logits of the first emitted token of every prompt."""
    leading = core._runner
    recorded = RecordedLogits()
    if hasattr(leading, "_inner"):
        leading._inner = recorded.runner(leading._inner)
    else:
        core._runner = recorded.runner(leading)
    drive(core)
    found |= {where: row for where, row in recorded.rows.items() if where[1] == len(where[0])}
