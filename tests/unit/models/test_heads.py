"""The head that ships: by name, by default, and refused where it does not belong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.checkpoints import write_llama
from sametoken.config import SpeculativeConfig
from sametoken.drafters.build import required_aux_layers
from sametoken.errors import CheckpointError, ConfigError, DrafterMismatchError
from sametoken.models import names as heads
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.loader import read_config
from sametoken.models.names import (
    EMBEDDED_FILE,
    HEAD_DIRECTORY,
    HEAD_FILES,
    HEAD_NAME,
    resolve_drafter,
)

SMOLLM2 = Path("/models") / EMBEDDED_FILE
MAX_BYTES = 25_000_000


def silent(text: str) -> None:
    pass


def spec_of(method: str = "eagle3", model: str | None = None) -> SpeculativeConfig:
    return SpeculativeConfig(method, 3, model)


def refused(kind, cause: str, remedy: str, spec, target=SMOLLM2) -> None:
    with pytest.raises(kind, match=cause) as caught:
        resolve_drafter(spec, target, silent)
    assert remedy in caught.value.remedy


def test_the_short_name_leads_into_the_package_for_any_target():
    said = []
    found, reasons = resolve_drafter(spec_of(model=HEAD_NAME), Path("/models/other"), said.append)
    assert found == spec_of(model=str(HEAD_DIRECTORY))
    assert reasons == {}
    assert said == [f"using {HEAD_NAME} from {HEAD_DIRECTORY}"]


def test_smollm2_takes_it_by_default_and_says_so():
    found, reasons = resolve_drafter(spec_of(), SMOLLM2, silent)
    assert found == spec_of(model=str(HEAD_DIRECTORY))
    assert HEAD_NAME in reasons["speculative_config"]


def test_a_cascade_takes_it_by_default_too():
    spec = SpeculativeConfig("eagle3", 8, cascade="ngram", cascade_model_tokens=3)
    found, _ = resolve_drafter(spec, SMOLLM2, silent)
    assert (found.model, found.cascade, found.num_model_tokens) == (str(HEAD_DIRECTORY), "ngram", 3)


def test_a_path_goes_before_the_short_name(tmp_path, monkeypatch):
    (tmp_path / HEAD_NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    found, _ = resolve_drafter(spec_of(model=HEAD_NAME), SMOLLM2, silent)
    assert found.model == HEAD_NAME


@pytest.mark.parametrize("spec", [None, spec_of("ngram"), spec_of("mtp")])
def test_methods_without_a_drafter_are_left_alone(spec):
    assert resolve_drafter(spec, SMOLLM2, silent) == (spec, {})


def test_other_drafters_are_models_by_name_or_path(tmp_path):
    found, reasons = resolve_drafter(spec_of("draft_model", str(tmp_path)), SMOLLM2, silent)
    assert found.model == str(tmp_path)
    assert reasons == {}
    refused(CheckpointError, "'gpt-5' is neither", "directory", spec_of("draft_model", "gpt-5"))


def test_no_head_ships_for_another_target():
    target = Path("/models/llama")
    refused(ConfigError, "none ships for /models/llama", 'set "model"', spec_of(), target)


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_another_method_than_the_head_is_made_for(method):
    cause = f"a head for the method 'eagle3', not for '{method}'"
    refused(ConfigError, cause, 'set "method"', spec_of(method, HEAD_NAME))


@pytest.mark.parametrize("lacking", HEAD_FILES)
@pytest.mark.parametrize("model", [None, HEAD_NAME])
def test_an_installation_without_its_files(tmp_path, monkeypatch, lacking, model):
    broken = shutil.copytree(HEAD_DIRECTORY, tmp_path / "head")
    (broken / lacking).unlink()
    monkeypatch.setattr(heads, "HEAD_DIRECTORY", broken)
    refused(CheckpointError, f"lacks {lacking} of {HEAD_NAME}", "install", spec_of(model=model))


def test_a_target_of_another_shape(tmp_path):
    target = read_config(write_llama(tmp_path / "target"))
    spec, _ = resolve_drafter(spec_of(model=HEAD_NAME), tmp_path / "target", silent)
    with pytest.raises(DrafterMismatchError, match="expects a target of 49152") as caught:
        required_aux_layers(spec, target)
    assert "trained for this target" in caught.value.remedy


def test_what_ships_is_small_and_described():
    sizes = {path.name: path.stat().st_size for path in HEAD_DIRECTORY.iterdir()}
    assert {*HEAD_FILES, "README.md"} <= sizes.keys()
    assert sum(sizes.values()) < MAX_BYTES
    assert Eagle3Checkpoint(HEAD_DIRECTORY).config.target_hidden_size == 576
