"""What is written is read; what JSON cannot hold is refused."""

from __future__ import annotations

import math

import pytest

from sametoken.bench.documents import read_json, write_json
from sametoken.errors import ConfigError


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"b": [1, 2.5, None, "é"]})
    assert read_json(path) == {"b": [1, 2.5, None, "é"]}
    assert [one.name for one in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"'])
def test_what_is_no_object_is_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_json(path)
    with pytest.raises(ConfigError, match=r"cannot be read as JSON \(no such file or directory\)"):
        read_json(tmp_path / "gone.json")


def test_what_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Give finite options"):
        write_json(tmp_path / "a.json", {"temperature": math.nan})
    assert not (tmp_path / "a.json").exists()
