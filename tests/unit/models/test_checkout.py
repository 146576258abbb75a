"""The small hybrid is found in a checkout of the repository, and missed by name elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from sametoken.errors import CheckpointError
from sametoken.models import names as checkout
from sametoken.models.names import (
    HYBRID_DIRECTORY,
    HYBRID_FILES,
    HYBRID_NAME,
    has_hybrid,
    resolve_model,
)

ROOT = Path(__file__).parents[3]


def test_a_checkout_has_it_and_fetches_nothing():
    said = []
    assert has_hybrid()
    assert resolve_model(HYBRID_NAME, said.append) == ROOT / "models" / HYBRID_NAME
    assert said == [f"using {HYBRID_NAME} from {HYBRID_DIRECTORY}"]


def test_an_existing_path_goes_first(tmp_path, monkeypatch):
    (tmp_path / HYBRID_NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(HYBRID_NAME, lambda text: None) == Path(HYBRID_NAME)


@pytest.mark.parametrize("missing", [HYBRID_FILES, HYBRID_FILES[1:2]], ids=["all", "weights"])
def test_elsewhere_cause_and_remedy_are_named(missing, tmp_path, monkeypatch):
    for name in set(HYBRID_FILES) - set(missing):
        (tmp_path / name).touch()
    monkeypatch.setattr(checkout, "HYBRID_DIRECTORY", tmp_path)
    assert not has_hybrid()
    with pytest.raises(CheckpointError, match="comes with the repository") as caught:
        resolve_model(HYBRID_NAME, lambda text: None)
    assert f"{tmp_path} lacks {', '.join(missing)}" in str(caught.value)
    assert f"models/{HYBRID_NAME}" in caught.value.remedy
