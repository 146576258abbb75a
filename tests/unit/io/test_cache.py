"""One cache directory for all, whatever the environment says."""

from __future__ import annotations

from pathlib import Path

import pytest

from sametoken.errors import ConfigError
from sametoken.io.cache_directory import (
    cache_directory,
    expanded,
    make_cache_directory,
    untrusted_reason,
)


@pytest.mark.parametrize(
    ("own", "shared", "wanted"),
    [
        ("/somewhere", "/xdg", "/somewhere"),
        ("~/x", "/xdg", "/home/me/x"),
        (None, "/xdg", "/xdg/sametoken"),
        (None, "~/xdg", "/home/me/xdg/sametoken"),
        ("", "", "/home/me/.cache/sametoken"),
        (None, None, "/home/me/.cache/sametoken"),
    ],
)
def test_the_environment_says_where(monkeypatch, own, shared, wanted):
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("SAMETOKEN_CACHE", own), ("XDG_CACHE_HOME", shared)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cache_directory() == Path(wanted)


def test_a_home_that_nobody_knows_is_named():
    with pytest.raises(ConfigError, match="~nobody-at-all/x"):
        expanded("~nobody-at-all/x")


def test_it_is_made_for_its_user_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("SAMETOKEN_CACHE", str(tmp_path / "a" / "b"))
    assert make_cache_directory() == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    make_cache_directory()


def test_hands_of_others_are_named(tmp_path):
    path = tmp_path / "file"
    path.touch(0o600)
    assert untrusted_reason(path) is None
    path.chmod(0o664)
    assert untrusted_reason(path) == "users other than its owner may write it"
    (tmp_path / "link").symlink_to(path)
    assert untrusted_reason(tmp_path / "link") == "it is a symbolic link"
