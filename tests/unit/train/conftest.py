"""A tiny target and text of its own; a module may have another target."""

from __future__ import annotations

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
