"""A library that somebody else may have written is never loaded, nor one that is cut short."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sametoken.errors import UnsupportedError
from sametoken.ops.native import build as building
from sametoken.ops.native.build import RECIPES, build, find_compiler

PLAIN = RECIPES[-1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMETOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path):
    """Notes that it ran, and writes a few bytes where ``-o`` says."""
    path = tmp_path / "cc"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\necho run >> {path}.log\n'
        'while [ "$1" != -o ]; do shift; done; echo library > "$2"\n'
    )
    path.chmod(0o755)
    return (str(path),)


def num_runs(compiler: tuple[str]) -> int:
    return len(Path(f"{compiler[0]}.log").read_text().splitlines())


def test_a_library_and_its_folder_are_the_user_s_alone(cache, compiler):
    before = os.umask(0)
    try:
        library = build(PLAIN, compiler)
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert library.stat().st_mode & 0o077 == 0


def writable(library: Path) -> None:
    library.chmod(0o722)


def by_the_group(library: Path) -> None:
    library.chmod(0o720)


def damaged(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:3])


def linked(library: Path) -> None:
    library.rename(library.parent.parent / "elsewhere.so")
    library.symlink_to(library.parent.parent / "elsewhere.so")


@pytest.mark.parametrize("change", [writable, by_the_group, damaged, linked])
def test_a_library_that_is_not_as_it_was_built_is_built_again(cache, compiler, caplog, change):
    library = build(PLAIN, compiler)
    runs = num_runs(compiler)
    assert build(PLAIN, compiler) == library
    assert num_runs(compiler) == runs
    change(library)
    with caplog.at_level(logging.WARNING):
        assert build(PLAIN, compiler) == library
    assert num_runs(compiler) == 2 * runs
    assert str(library) in caplog.text
    assert library.read_text() == "library\n"
    assert not library.is_symlink()
    assert library.stat().st_mode & 0o077 == 0


def test_a_library_of_another_user_is_built_again(cache, compiler, monkeypatch):
    library, lstat = build(PLAIN, compiler), Path.lstat
    runs = num_runs(compiler)

    def foreign(path: Path) -> os.stat_result:
        found = list(lstat(path))
        found[4] = 4711 if path == library else found[4]
        return os.stat_result(found)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", foreign)
        build(PLAIN, compiler)
    assert num_runs(compiler) == 2 * runs


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o707])
def test_nothing_is_loaded_from_a_folder_that_others_may_write(cache, compiler, mode):
    build(PLAIN, compiler)
    cache.chmod(mode)
    with pytest.raises(UnsupportedError, match=f"{cache}: users other than its owner"):
        build(PLAIN, compiler)


def test_nothing_is_loaded_from_a_folder_of_another_user(cache, compiler, monkeypatch):
    build(PLAIN, compiler)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    owner = cache.stat().st_uid
    foreign = [4242 if i == 4 else value for i, value in enumerate(cache.lstat())]
    monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result(foreign))
    with pytest.raises(UnsupportedError, match="user 4242 owns it"):
        build(PLAIN, compiler)
    assert owner != 4242


LOAD = """
import ctypes
from sametoken.ops.native.build import RECIPES, build
print(ctypes.CDLL(str(build(RECIPES[-1], {compiler!r}))).answer())
"""


def test_a_truncated_library_ends_no_process(cache, tmp_path):
    """A mapped file without its pages kills whoever touches them."""
    (tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    command = " ".join(find_compiler())
    path = tmp_path / "cc"
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\nwhile [ "$1" != -o ]; do shift; done\n'
        f'exec {command} -shared -fPIC -o "$2" {tmp_path}/answer.c\n'
    )
    path.chmod(0o755)
    library = build(PLAIN, (str(path),))
    os.truncate(library, 1000)
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(compiler=(str(path),))],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_builds_at_the_same_time_leave_one_whole_library(cache, compiler):
    code = (
        "from sametoken.ops.native.build import RECIPES, build;"
        f"print(build(RECIPES[-1], {compiler!r}))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {process.communicate(timeout=120)[0] for process in running}
    assert [f"{path}\n" for path in cache.iterdir()] == list(said)
    assert build(PLAIN, compiler).read_text() == "library\n"


def test_the_checksum_is_the_content_s(cache, compiler):
    library = build(PLAIN, compiler)
    assert library.stem.endswith(building._checksum(library))
