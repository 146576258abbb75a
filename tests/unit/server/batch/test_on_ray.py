"""Rounds over what is left of a batch; how Ray itself loses engines is shown elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest
from ray.exceptions import ObjectLostError, RayActorError

from sametoken.config import EngineConfig
from sametoken.errors import EngineDeadError
from sametoken.server.batch import on_ray
from sametoken.server.batch.config import BatchConfig
from sametoken.server.batch.lines import InputLine

LINES = [InputLine(number, f'{{"custom_id": "{number}"}}'.encode()) for number in range(6)]


def answers_to(lines) -> pa.Table:
    keys = [line.key for line in lines]
    return pa.table({"key": keys, "result": [f"answer to {key}".encode() for key in keys]})


@pytest.fixture
def run(monkeypatch):
    """Answers ``LINES`` by rounds as the test writes them: from lines to what comes, in order."""

    def over(*rounds):
        waiting, asked, taken, contexts = list(rounds), [], [], []

        def dataset(config, batch_config, lines):
            context = SimpleNamespace()
            asked.append(len(lines))
            contexts.append(context)

            def iter_batches(**options):
                for one in waiting.pop(0)(lines):
                    if isinstance(one, Exception):
                        raise one
                    yield one

            return SimpleNamespace(context=context, iter_batches=iter_batches)

        monkeypatch.setattr(on_ray, "connect", lambda: False)
        monkeypatch.setattr(on_ray, "_dataset", dataset)
        config = EngineConfig(device="cpu")
        try:
            on_ray.answer_on_ray(config, BatchConfig(ray=True), LINES, taken.extend)
        finally:
            run.asked, run.taken = asked, dict(taken)
            assert len(run.taken) == len(taken), "a line was answered twice"
            assert all(context.max_errored_blocks == -1 for context in contexts)

    def run(*rounds):
        over(*rounds)
        assert run.taken == {line.key: f"answer to {line.key}".encode() for line in LINES}

    return run


def test_lost_blocks_are_asked_again_and_no_others(run):
    run(
        lambda lines: [answers_to(lines[:2]), answers_to(lines[4:])],
        lambda lines: [answers_to(lines[1:])],
        lambda lines: [answers_to(lines)],
    )
    assert run.asked == [6, 2, 1]


def test_results_that_a_node_took_with_it_are_asked_again(run):
    lost = ObjectLostError("0" * 56, None, "")
    run(lambda lines: [answers_to(lines[:4]), lost], lambda lines: [answers_to(lines)])
    assert run.asked == [6, 2]


def test_engines_that_are_lost_again_and_again_end_the_run(run):
    with pytest.raises(EngineDeadError, match="lost 5 times"):
        run(lambda lines: [answers_to(lines[:3])], *[lambda lines: []] * 5)
    assert run.asked == [6, 3, 3, 3, 3, 3]
    assert len(run.taken) == 3


def test_why_an_engine_cannot_go_on_is_told(run):
    failure = pa.table({"key": [None], "result": [b"a step failed"]})
    with pytest.raises(EngineDeadError, match=r"\(a step failed\)"):
        run(lambda lines: [answers_to(lines[:2]), failure])
    assert len(run.taken) == 2


def test_why_an_engine_cannot_start_is_told(run):
    with pytest.raises(EngineDeadError, match="same command goes on") as caught:
        run(lambda lines: [RayActorError()])
    assert isinstance(caught.value.__cause__, RayActorError)
