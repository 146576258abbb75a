"""Files of a batch: a bad line is refused alone, and a journal or a disk that fails by name."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from helpers.fake_engine import FakeEngine
from helpers.limits import files_up_to
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, RequestError
from sametoken.serving.batch import run as module
from sametoken.serving.batch.config import BatchConfig
from sametoken.serving.batch.run import BatchSummary, run_batch

CONFIG = EngineConfig(model="toy", device="cpu")
BATCH = BatchConfig(("toy",), concurrency=2)


class Engine(FakeEngine):
    """Answers with a text of some length, and ends the run at one prompt."""

    fatal = ""

    def __init__(self) -> None:
        super().__init__(lambda prompt, index: f"re {prompt}" + " x" * 500)

    def begin(self, request):
        if request.prompt.text == self.fatal:
            raise KeyboardInterrupt
        return super().begin(request)

    async def shutdown(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch) -> Engine:
    made = Engine()

    async def start(config, limits):
        return made

    monkeypatch.setattr(module.AsyncLLM, "start", start)
    return made


def good(i: int) -> bytes:
    body = {"prompt": f"p{i}"}
    line = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode()


def write(path: Path, count: int) -> Path:
    path.write_bytes(b"\n".join(map(good, range(count))) + b"\n")
    return path


def texts(output: Path) -> list[str]:
    results = [json.loads(line) for line in output.read_bytes().splitlines()]
    return [one["response"]["body"]["choices"][0]["text"].split(" x")[0] for one in results]


NESTED = b'{"custom_id": "n", "method": "POST", "url": "/v1/completions", "body": '
BAD = {
    "nested": (NESTED + b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "invalid_json"),
    "never closed": (b"[" * 100_000, "invalid_json"),
    "long number": (NESTED + b'{"max_tokens": ' + b"9" * 5000 + b"}}", "invalid_json"),
    "half a pair": (NESTED + rb'{"prompt": "\ud800"}}', "invalid_json"),
    "not UTF-8": (NESTED + b'{"prompt": "\xff"}}', "invalid_json"),
    "zero bytes": (b"\0" * 50, "invalid_json"),
    "no number": (NESTED + b'{"temperature": NaN}}', "invalid_json"),
    "a list": (b'["custom_id"]', "invalid_request"),
    "a text": (b'"custom_id"', "invalid_request"),
    "nothing": (b"null", "invalid_request"),
    "an id again": (good(0), "duplicate_custom_id"),
    "other types": (
        b'{"custom_id": ["c"], "method": {}, "url": 3, "body": "x"}',
        "invalid_request",
    ),
}


def test_bad_lines_are_refused_and_the_others_answered(engine, tmp_path):
    lines = [good(0)]
    for number, (bad, _) in enumerate(BAD.values(), 1):
        lines += [bad, good(number)]
    (tmp_path / "in").write_bytes(b"\n".join(lines))
    summary = run_batch(CONFIG, tmp_path / "in", tmp_path / "out", BATCH)
    assert summary == BatchSummary(len(BAD) + 1, 0, len(BAD))
    results = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert [one["custom_id"] for one in results[::2]] == [f"c{i}" for i in range(len(BAD) + 1)]
    assert all(one["response"]["status_code"] == 200 for one in results[::2])
    codes = {name: one["error"]["code"] for name, one in zip(BAD, results[1::2], strict=True)}
    assert codes == {name: code for name, (_, code) in BAD.items()}
    assert all(one["response"] is None for one in results[1::2])


def test_a_line_without_end_takes_no_memory(engine, tmp_path):
    source = tmp_path / "in"
    with source.open("wb") as file:
        file.write(good(0) + b"\n")
        # Zero bytes that take no room on the disk, up to the last line.
        file.seek(100 * 10**6, os.SEEK_CUR)
        file.write(b"\n" + good(1))
    tracemalloc.start()
    try:
        run_batch(CONFIG, source, tmp_path / "out", BatchConfig(("toy",), max_line_bytes=10**6))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30e6
    results = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert [one["error"] and one["error"]["code"] for one in results] == [
        None,
        "line_too_long",
        None,
    ]


def test_an_output_that_cannot_be_one_is_refused_by_name(engine, tmp_path):
    source = write(tmp_path / "in", 1)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(source)
    for name, says in (
        ("in", "is the input itself"),
        ("link", "is the input itself"),
        ("folder", "is no regular file"),
        ("fifo", "is no regular file"),
        ("in/below", "cannot be used"),
        ("n" * 300, "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=says):
            run_batch(CONFIG, source, tmp_path / name, BATCH)
    assert source.read_bytes() == good(0) + b"\n"


def test_a_folder_of_requests_is_refused(engine, tmp_path):
    with pytest.raises(RequestError, match="cannot be read"):
        run_batch(CONFIG, tmp_path, tmp_path / "out", BATCH)


def test_a_device_is_refused(engine, tmp_path):
    # The one that ends; /dev/zero does not.
    with pytest.raises(RequestError, match="it is a device"):
        run_batch(CONFIG, Path(os.devnull), tmp_path / "out.jsonl", BATCH)


def test_a_pipe_of_requests_is_read(engine, tmp_path):
    reader, writer = os.pipe()
    os.write(writer, good(0) + b"\n" + good(1) + b"\n")
    os.close(writer)
    try:
        source = Path(f"/dev/fd/{reader}")
        assert run_batch(CONFIG, source, tmp_path / "out.jsonl", BATCH) == BatchSummary(2, 0, 0)
    finally:
        os.close(reader)


def test_a_full_disk_ends_the_run_and_the_next_one_goes_on(engine, tmp_path):
    source, output = write(tmp_path / "in", 12), tmp_path / "out"
    with files_up_to(6000), pytest.raises(ConfigError, match=r"part-00000.* cannot be used"):
        run_batch(CONFIG, source, output, BATCH)
    part = (tmp_path / "out.parts" / "part-00000.jsonl").read_bytes()
    assert part.endswith(b"\n")
    kept = part.count(b"\n")
    assert 0 < kept < 12
    assert run_batch(CONFIG, source, output, BATCH) == BatchSummary(12 - kept, kept, 0)
    assert texts(output) == [f"re p{i}" for i in range(12)]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "out"]


def test_a_disk_too_full_for_the_output_keeps_the_results(engine, tmp_path):
    source, output = write(tmp_path / "in", 12), tmp_path / "out"
    run_batch(CONFIG, source, output, BATCH)
    size = output.stat().st_size
    output.unlink()
    engine.fatal = "p6"
    with pytest.raises(KeyboardInterrupt):
        run_batch(CONFIG, source, output, BATCH)
    engine.fatal = ""
    with files_up_to(size - 1), pytest.raises(ConfigError, match="out cannot be used"):
        run_batch(CONFIG, source, output, BATCH)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "out.parts"]
    assert run_batch(CONFIG, source, output, BATCH) == BatchSummary(0, 12, 0)
    assert texts(output) == [f"re p{i}" for i in range(12)]


@pytest.fixture
def begun(engine, tmp_path) -> Path:
    """The journal of a run that ended early, twice."""
    for fatal in ("p4", "p8"):
        engine.fatal = fatal
        with pytest.raises(KeyboardInterrupt):
            run_batch(CONFIG, write(tmp_path / "in", 12), tmp_path / "out", BATCH)
    engine.fatal = ""
    return tmp_path / "out.parts"


def run_again(begun: Path) -> BatchSummary:
    return run_batch(CONFIG, begun.with_name("in"), begun.with_name("out"), BATCH)


def test_settings_that_cannot_be_read_are_refused(begun):
    path = begun / "settings.json"
    for settings in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b"\xff",
        b"\0" * 9,
        b"[" * 100_000,
        b"9" * 5000,
    ):
        path.write_bytes(settings)
        with pytest.raises(ConfigError, match=r"settings\.json does not hold"):
            run_again(begun)
    path.unlink()
    with pytest.raises(ConfigError, match=r"settings\.json does not hold"):
        run_again(begun)


@pytest.mark.parametrize(
    "change", [{"format": "sametoken-batch-0"}, {"model": ["toy"]}, {"of_a_later_version": 1}]
)
def test_a_journal_of_another_version_or_other_settings_is_refused(begun, change):
    path = begun / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=f"holds results of a run with {next(iter(change))}="):
        run_again(begun)


def test_a_part_that_is_missing_or_no_file_is_refused(begun):
    (begun / "part-00000.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"part-00000\.jsonl is missing") as caught:
        run_again(begun)
    assert "answered again" in caught.value.remedy
    (begun / "part-00000.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"part-00000\.jsonl is missing"):
        run_again(begun)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: os.urandom(len(whole)),
        lambda whole: b"\0" * len(whole),
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole.replace(b"re p1", b"re p9"),
        # A record whose checksum is right and whose key is no text.
        lambda whole: b"b0cdba59 \xff\xfe {}\n" + whole,
        lambda whole: b"",
    ],
)
def test_a_part_that_was_spoilt_costs_its_records_alone(begun, spoil):
    part = begun / "part-00000.jsonl"
    part.write_bytes(spoil(part.read_bytes()))
    summary = run_again(begun)
    assert summary.num_answered + summary.num_kept == 12
    assert texts(begun.with_name("out")) == [f"re p{i}" for i in range(12)]


def test_a_journal_where_a_file_stands_is_refused(engine, tmp_path):
    (tmp_path / "out.parts").write_text("mine")
    with pytest.raises(ConfigError, match=r"out\.parts cannot be used"):
        run_batch(CONFIG, write(tmp_path / "in", 1), tmp_path / "out", BATCH)
    assert (tmp_path / "out.parts").read_text() == "mine"
