"""Sessions: what does not fit is refused before anything is measured."""

from __future__ import annotations

import pytest

from helpers.checkpoints import write_config
from sametoken.bench import roofline, session
from sametoken.bench.session import Session
from sametoken.bench.workload import Workload
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setattr(roofline, "CPU_BYTES", 1 << 20)
    return str(write_config(tmp_path / "target"))


def open_session(target, workload, **options):
    kinds = ("prompts", "dataset", "announce")
    own = {name: options.pop(name) for name in kinds if name in options}
    config = EngineConfig.from_options(model=target, load_format="dummy", **options)
    return Session.open(config, workload, **own)


def test_sizes_and_warm_up_are_as_asked(target):
    workload = Workload(input_len=8, output_len=6, concurrency=(2,))
    session = open_session(target, workload)
    done = []
    summary = session.run(2, [2, 3], warmup=2, advance=lambda: done.append(1))
    assert (summary.num_requests, summary.num_tokens, len(done)) == (5, 30, 5)
    assert summary.floor_fraction > 0
    assert session.run(1, [1], warmup=0).num_requests == 1


@pytest.mark.parametrize(
    ("workload", "cause"),
    [
        (Workload(input_len=8, output_len=8, concurrency=(1, 5)), "above max_num_seqs=4"),
        (Workload(input_len=60, output_len=8), "longer than max_model_len=64"),
    ],
)
def test_what_does_not_fit_is_refused(target, workload, cause):
    with pytest.raises(ConfigError, match=cause):
        open_session(target, workload, max_num_seqs=4)


def test_little_kv_memory_is_told(target):
    told = []
    workload = Workload(input_len=40, output_len=8, concurrency=(4,))
    options = {"num_kv_blocks": 4, "max_num_seqs": 4, "announce": told.append}
    session = open_session(target, workload, **options)
    assert any("not all requests will run at once" in line for line in told)
    assert session.run(4, [4]).num_tokens == 32


def test_prompts_of_a_file(target, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("[1, 2, 3]\n[4, 5]")
    session = open_session(target, Workload(output_len=4), prompts=path)
    assert session.workload.prompts == ((1, 2, 3), (4, 5))
    assert session.run(1, [3]).num_tokens == 12
    for text, cause in (("[23]", "token id 23"), ('"a text"', "no tokenizer")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=cause):
            open_session(target, Workload(output_len=4), prompts=path)


@pytest.mark.parametrize(
    ("text", "dataset", "cause"),
    [
        ("[1, 2]\n3", None, "line 2 of .* is no prompt"),
        ("[1, 2]\n[23]", None, "line 2 of .* holds token id 23, which is not in the vocabulary"),
        ("[1, 2]\n[" + "1, " * 70 + "1]", None, "requests of 75 tokens are longer than"),
        ('"a"\n3', "custom", "line 2 of .* is no prompt"),
    ],
)
def test_prompts_are_checked_before_anything_is_measured(
    target, tmp_path, monkeypatch, text, dataset, cause
):
    monkeypatch.setattr(session, "read_bandwidth", lambda *given: pytest.fail("measured"))
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    source = {"dataset": (dataset, path)} if dataset else {"prompts": path}
    with pytest.raises(ConfigError, match=cause):
        open_session(target, Workload(output_len=4), **source)


def test_another_workload_keeps_engine_and_prompts(target, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("[1, 2, 3]")
    session = open_session(target, Workload(output_len=4), prompts=path)
    other = session.with_workload(Workload(output_len=9))
    assert other.resolved is session.resolved
    assert other.workload.prompts == ((1, 2, 3),)
    assert other.run(1, [1]).num_tokens == 9
    with pytest.raises(ConfigError, match="longer than max_model_len=64"):
        session.with_workload(Workload(output_len=90))
    slots = session.resolved.config.max_num_seqs
    with pytest.raises(ConfigError, match=f"above max_num_seqs={slots}"):
        session.with_workload(Workload(output_len=4, concurrency=(slots + 1,)))


def test_traces_are_of_the_last_run(target):
    session = open_session(target, Workload(input_len=8, output_len=6, concurrency=(2,)))
    assert session.run(2, [2]).traces == ()
    summary = session.run(2, [2, 3], num_traced=2)
    assert len(summary.traces) == 2
    assert all(len(trace["token_ids"]) == 6 for trace in summary.traces)
    # Without a tokenizer the ids are the text.
    (trace, _) = summary.traces
    assert trace["texts"][0] == f"{trace['token_ids'][0]} "
    assert int(trace["request"].removeprefix("bench-")) >= 4


def test_a_dataset_needs_a_tokenizer(target):
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        open_session(target, Workload(output_len=4), dataset=("gsm8k", None))
