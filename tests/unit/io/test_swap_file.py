"""A file without a name: what is read is what was written, or the file is given up with a word."""

from __future__ import annotations

import os
import stat

import pytest

from sametoken.errors import ConfigError
from sametoken.io.swap_file import SwapFile

BLOCK = 5000


def held(count: int) -> list[bytearray]:
    return [bytearray([i + 1]) * BLOCK for i in range(count)]


def opened(tmp_path, blocks) -> SwapFile:
    return SwapFile(str(tmp_path), 9, lambda index: memoryview(blocks[index]))


def test_blocks_come_back_and_nobody_else_sees_the_file(tmp_path):
    blocks = held(4)
    file = opened(tmp_path, blocks)
    for place, block in ((8, 0), (2, 1)):
        file.write(place, block)
        assert file.finished(wait=True) == [(place, True)]
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(file._file.fileno()).st_mode) == 0o600
    for place, block in ((8, 2), (2, 3)):
        file.read(place, block)
        assert file.finished(wait=True) == [(place, True)]
    assert blocks[2:] == held(2)
    assert file.finished() == []


@pytest.mark.parametrize("damage", ["content", "length"])
def test_what_was_changed_is_refused_and_said_once(damage, tmp_path, caplog):
    file = opened(tmp_path, held(2))
    for place in (0, 1):
        file.write(place, place)
        file.finished(wait=True)
    if damage == "content":
        os.pwrite(file._file.fileno(), b"x", BLOCK + 7)
    else:
        os.ftruncate(file._file.fileno(), 2 * BLOCK - 1)
    file.read(0, 0)
    assert file.finished(wait=True) == [(0, True)]
    for _ in range(2):
        file.read(1, 1)
        assert file.finished(wait=True) == [(1, False)]
    assert file.num_blocks == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_full_disk_is_said_once_and_nothing_more_is_written(tmp_path, monkeypatch, caplog):
    file = opened(tmp_path, held(2))
    asked = []

    def full(*arguments):
        asked.append(arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        file.write(0, 0)
        assert file.finished(wait=True) == [(0, False)]
    assert len(asked) == 1
    assert "No space left on device" in caplog.text


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot hold a file"):
        opened(tmp_path / "nowhere", [])
