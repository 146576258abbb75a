"""A tiny target and text of its own, which a module may replace; a training cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.training import write_own_text, write_target
from sametoken.train.distillation import TrainingText


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(target, tmp_path_factory) -> TrainingText:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    write_own_text(target, path)
    return TrainingText(file=path)


@pytest.fixture
def cut_off() -> Callable[..., None]:
    """Runs a training that its first report ends."""

    class Stop(Exception):
        pass

    def stop(now):
        raise Stop

    def run(train, *args, **options):
        with pytest.raises(Stop):
            train(*args, report=stop, **options)

    return run
