from __future__ import annotations

import codecs
import gzip
import json

import pytest

from sametoken.errors import RequestError
from sametoken.serving.batch.lines import (
    BatchRequest,
    BatchResponse,
    BatchResult,
    InputLine,
    read_input,
    to_line,
)

MOST = 2**20
GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def written(path, *lines: bytes | dict):
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw))
    return path


def test_lines_keep_their_numbers_and_blank_ones_are_none(tmp_path):
    path = written(tmp_path / "in", GOOD, b"", b"  \r", GOOD | {"custom_id": "b"})
    lines = read_input(path, MOST)
    assert [line.number for line in lines] == [1, 4]
    requests = [line.parse() for line in lines]
    assert [request.custom_id for request in requests] == ["a", "b"]
    assert requests[0].body == {"prompt": "x"}


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path):
    lines = read_input(written(tmp_path / "plain", GOOD), MOST)
    marked = codecs.BOM_UTF8 + json.dumps(GOOD).encode()
    assert read_input(written(tmp_path / "marked", marked), MOST) == lines
    (empty,) = read_input(written(tmp_path / "empty", codecs.BOM_UTF8, GOOD), MOST)
    assert empty.number == 2


def test_a_packed_file_has_the_same_lines(tmp_path):
    plain = written(tmp_path / "in.jsonl", GOOD, b"{", b"3" * 40)
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_input(packed, 30) == read_input(plain, 30)
    for broken in (packed.read_bytes()[:-9], b"{}", gzip.compress(b"{}")[:10] + b"\xff" * 20):
        packed.write_bytes(broken)
        with pytest.raises(RequestError, match="cannot be read"):
            read_input(packed, MOST)


def test_a_changed_line_has_another_key():
    one, same, other = (InputLine(n, raw) for n, raw in ((1, b"{}"), (2, b"{}"), (1, b"{ }")))
    assert one.key == same.key != other.key
    assert len(one.key) == 32


def test_a_line_that_is_too_long_has_another_key_if_its_end_changed(tmp_path):
    lines = [b"3" * 40, b"3" * 39 + b"4", b"3" * 40, b""]
    one, other, same = read_input(written(tmp_path / "in", *lines), 30)
    assert one.key == same.key != other.key


@pytest.mark.parametrize(
    ("raw", "custom_id", "code", "says"),
    [
        (b"{", None, "invalid_json", "not JSON"),
        (b"\xff\xfe", None, "invalid_json", "not JSON"),
        (b"3", None, "invalid_request", "line 7: it is no JSON object"),
        (b'{"custom_id": "a"}', "a", "invalid_request", "method"),
        (json.dumps(GOOD | {"custom_id": 3}).encode(), None, "invalid_request", "custom_id"),
        (json.dumps(GOOD | {"url": "/v1/embeddings"}).encode(), "a", "invalid_request", "url"),
        (json.dumps(GOOD | {"method": "GET"}).encode(), "a", "invalid_request", "method"),
        (json.dumps(GOOD | {"body": []}).encode(), "a", "invalid_request", "body"),
    ],
)
def test_a_line_that_is_no_request_says_why(raw, custom_id, code, says):
    result = InputLine(7, raw).parse()
    assert isinstance(result, BatchResult)
    assert (result.custom_id, result.response, result.error.code) == (custom_id, None, code)
    assert "line 7" in result.error.message
    assert says in result.error.message


@pytest.mark.parametrize("again", [GOOD | {"body": {}}, {"custom_id": "a"}])
def test_a_custom_id_that_comes_again_refuses_that_line_with_both_numbers(tmp_path, again):
    first, _, last = read_input(written(tmp_path / "in", GOOD, b"{", again), MOST)
    assert isinstance(first.parse(), BatchRequest)
    refused = last.parse()
    assert isinstance(refused, BatchResult)
    assert (refused.error.code, refused.custom_id) == ("duplicate_custom_id", "a")
    assert refused.error.message == "line 3: its custom_id is that of line 1"


def test_lines_without_an_id_are_not_alike(tmp_path):
    lines = read_input(written(tmp_path / "in", b"{", b"{", b"3"), MOST)
    codes = [line.parse().error.code for line in lines]
    assert codes == ["invalid_json", "invalid_json", "invalid_request"]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_may_be_so_long_and_no_longer(tmp_path, end):
    good = json.dumps(GOOD).encode()
    (tmp_path / "in").write_bytes(good + b"\n" + b" " + good + b"\n" + good + end)
    first, longer, last = read_input(tmp_path / "in", len(good))
    assert first.raw == last.raw == good
    assert [first.number, longer.number, last.number] == [1, 2, 3]
    assert longer.parse().error.code == "line_too_long"
    assert len(longer.raw) == 32


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(RequestError, match=r"none cannot be read \(no such file or directory\)\. "):
        read_input(tmp_path / "none", MOST)


def test_a_result_has_openai_s_fields():
    response = BatchResponse(status_code=200, request_id="r", body={"text": "a\nb\u2028"})
    line = to_line(BatchResult(id="i", custom_id="c", response=response))
    assert b"\n" not in line
    assert json.loads(line) == {
        "id": "i",
        "custom_id": "c",
        "response": {"status_code": 200, "request_id": "r", "body": {"text": "a\nb\u2028"}},
        "error": None,
    }


def test_a_good_line_is_a_request():
    assert InputLine(1, json.dumps(GOOD).encode()).parse() == BatchRequest(**GOOD)
