from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from sametoken.errors import ConfigError
from sametoken.io import journal as module
from sametoken.io.journal import Journal, write_whole

RESULTS = [("k1", b'{"a": 1}'), ("k2", b'{"b": "x y"}'), ("k3", b"{}")]
SETTINGS = {"model": "m", "names": ["a"]}


def opened(directory: Path, **settings) -> Journal:
    return Journal(directory, SETTINGS | settings)


def parts(directory: Path) -> list[Path]:
    return sorted(directory.glob("part-*"))


def test_what_was_appended_is_found_by_this_run_and_the_next(tmp_path):
    with opened(tmp_path / "j") as journal:
        journal.append(RESULTS[:2])
        assert journal["k2"] == RESULTS[1][1]
        assert "k3" not in journal
    with opened(tmp_path / "j") as journal:
        journal.append(RESULTS[2:])
        assert [journal[key] for key, _ in RESULTS] == [result for _, result in RESULTS]
    assert len(parts(tmp_path / "j")) == 2


def test_a_crash_at_any_byte_leaves_whole_records_alone(tmp_path):
    with opened(tmp_path / "j") as journal:
        journal.append(RESULTS)
    (part,) = parts(tmp_path / "j")
    whole = part.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        directory = tmp_path / str(length)
        directory.mkdir()
        shutil.copy(part.with_name("settings.json"), directory)
        (directory / part.name).write_bytes(whole[:length])
        with opened(directory) as journal:
            kept = {key: journal[key] for key, _ in RESULTS if key in journal}
            assert kept == dict(RESULTS[: sum(end <= length for end in ends)])
            journal.append(RESULTS)
        with opened(directory) as journal:
            assert [journal[key] for key, _ in RESULTS] == [result for _, result in RESULTS]


def test_a_record_whose_bytes_are_wrong_counts_as_not_there(tmp_path):
    with opened(tmp_path / "j") as journal:
        journal.append(RESULTS)
    (part,) = parts(tmp_path / "j")
    spoilt = bytearray(part.read_bytes())
    spoilt[spoilt.index(b"x y")] ^= 1
    part.write_bytes(spoilt)
    with opened(tmp_path / "j") as journal:
        assert [key in journal for key, _ in RESULTS] == [True, False, True]


def test_a_result_is_recorded_once(tmp_path):
    with opened(tmp_path / "j") as journal:
        journal.append([("k", b"first"), ("k", b"second")])
        journal.append([("k", b"third")])
        assert journal["k"] == b"first"
    assert parts(tmp_path / "j")[0].read_bytes().count(b"\n") == 1


def test_of_two_parts_the_earlier_one_counts(tmp_path):
    for part, result in (("part-00000.jsonl", b"first"), ("part-00001.jsonl", b"second")):
        with opened(tmp_path / part) as journal:
            journal.append([("k", result)])
        (tmp_path / "j").mkdir(exist_ok=True)
        shutil.copy(tmp_path / part / "settings.json", tmp_path / "j")
        parts(tmp_path / part)[0].rename(tmp_path / "j" / part)
    with opened(tmp_path / "j") as journal:
        assert journal["k"] == b"first"


def test_append_returns_when_the_disk_has_it(tmp_path, monkeypatch):
    synced = []
    with opened(tmp_path / "j") as journal:
        (part,) = parts(tmp_path / "j")
        monkeypatch.setattr(module.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
        journal.append(RESULTS)
        assert synced == [part.stat().st_size]
        assert synced[0] > 0


def test_one_run_at_a_time(tmp_path):
    with (
        opened(tmp_path / "j"),
        pytest.raises(ConfigError, match="is held by process"),
        opened(tmp_path / "j"),
    ):
        pass
    with opened(tmp_path / "j"):
        pass


def test_other_settings_are_refused_by_name(tmp_path):
    with opened(tmp_path / "j") as journal:
        journal.append(RESULTS)
    with pytest.raises(ConfigError, match="names=\\['a'\\], and this one has \\['b'\\]"):
        opened(tmp_path / "j", names=["b"])
    with opened(tmp_path / "j"):
        pass


def test_settings_of_a_run_that_was_killed_without_a_result_bind_nobody(tmp_path):
    with opened(tmp_path / "j") as journal:
        journal._is_new = False
    assert len(parts(tmp_path / "j")) == 1
    with opened(tmp_path / "j", names=["b"]) as journal:
        journal.append(RESULTS)
    with pytest.raises(ConfigError, match="names=\\['b'\\], and this one has \\['a'\\]"):
        opened(tmp_path / "j")


def test_a_run_without_a_result_leaves_nothing(tmp_path):
    with opened(tmp_path / "j"):
        pass
    assert list(tmp_path.iterdir()) == []
    # What was there before stays.
    (tmp_path / "j").mkdir()
    with opened(tmp_path / "j"):
        pass
    assert (tmp_path / "j").is_dir()


def test_an_append_that_is_interrupted_leaves_no_part_of_a_record(tmp_path, monkeypatch):
    def write_half(file, text):
        file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    with opened(tmp_path / "j") as journal:
        journal.append(RESULTS[:1])
        with monkeypatch.context() as patch:
            patch.setattr(module, "_write_all", write_half)
            with pytest.raises(KeyboardInterrupt):
                journal.append(RESULTS[1:])
        assert len(journal) == 1
        journal.append(RESULTS[1:])
    (part,) = parts(tmp_path / "j")
    assert part.read_bytes().count(b"\n") == len(RESULTS)
    with opened(tmp_path / "j") as journal:
        assert [journal[key] for key, _ in RESULTS] == [result for _, result in RESULTS]


def test_removal_leaves_nothing(tmp_path):
    with opened(tmp_path / "j") as journal:
        journal.append(RESULTS)
        journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    def lines():
        yield b"new"
        raise KeyboardInterrupt

    path = tmp_path / "out"
    write_whole(path, [b"old", b"lines"])
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, lines())
    assert path.read_bytes() == b"old\nlines\n"


@pytest.mark.parametrize(
    ("fault", "remedy"), [(errno.ENOSPC, "Make room there"), (errno.EACCES, "Make it writable")]
)
def test_the_remedy_is_that_of_the_fault(tmp_path, monkeypatch, fault, remedy):
    def sync(directory):
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(module, "sync", sync)
    with pytest.raises(ConfigError, match=remedy):
        write_whole(tmp_path / "out", [b"lines"])
