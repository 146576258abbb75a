"""OpenAI's batch format: lines of the input and of the output."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sametoken.errors import RequestError, in_words
from sametoken.io.json_text import parse_json

_KEY_DIGITS = 32
_SKIPPED_BYTES = 2**20


class BatchRequest(BaseModel):
    """A line of the input; its endpoint validates the body."""

    model_config = ConfigDict(strict=True)

    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class BatchResponse(BaseModel):
    """The endpoint's response; with a status other than 200, ``body`` is an error."""

    status_code: int
    request_id: str
    body: dict[str, Any]


class BatchError(BaseModel):
    """Why a line has no response."""

    code: str
    message: str


class BatchResult(BaseModel):
    """A line of the output: a response or an error."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None


@dataclass(frozen=True)
class InputLine:
    """One line of the input that is not blank.

    Attributes:
        number: counted from 1.
        raw: its bytes without the line's end; their digest if the line is too long.
        refusal: an error found while reading the file.
        refused_id: its custom_id, if it has one and was refused.
    """

    number: int
    raw: bytes
    refusal: BatchError | None = None
    refused_id: str | None = None

    @cached_property
    def key(self) -> str:
        """A hash of the line's content: a changed line has another key."""
        return hashlib.sha256(self.raw).hexdigest()[:_KEY_DIGITS]

    @property
    def result_id(self) -> str:
        """The id of its result."""
        return f"batch_req_{self.key}"

    def parse(self) -> BatchRequest | BatchResult:
        """The request, or a result with the error."""
        if self.refusal is not None:
            return BatchResult(id=self.result_id, custom_id=self.refused_id, error=self.refusal)
        try:
            given = parse_json(self.raw)
        except ValueError as error:
            return self.refused("invalid_json", f"it is not JSON: {error}").parse()
        if not isinstance(given, dict):
            return self.refused("invalid_request", "it is no JSON object").parse()
        custom_id = given.get("custom_id")
        try:
            return BatchRequest.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            named = custom_id if isinstance(custom_id, str) else None
            return self.refused("invalid_request", f"{where}: {first['msg']}", named).parse()

    def refused(self, code: str, message: str, custom_id: str | None = None) -> InputLine:
        """The line with an error."""
        error = BatchError(code=code, message=f"line {self.number}: {message}")
        return replace(self, refusal=error, refused_id=custom_id)


def read_input(path: Path, max_line_bytes: int) -> list[InputLine]:
    """The lines of a file, in order. Lines that repeat a custom_id are refused.

    Args:
        path: the file, or a pipe; devices may have no end. One whose name ends in .gz is unpacked.
        max_line_bytes: longer lines are refused, and not kept.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                raise OSError("it is a device")
            lines = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            return list(_with_unique_ids(_not_blank(lines, max_line_bytes)))
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(
            f"{path} cannot be read ({in_words(error)})", "name a file of requests"
        ) from error


def to_line(result: BatchResult) -> bytes:
    """A result as a line of the output, without the line's end."""
    return json.dumps(result.model_dump()).encode()


def _not_blank(file: BinaryIO | gzip.GzipFile, max_line_bytes: int) -> Iterator[InputLine]:
    number = 0
    while raw := file.readline(max_line_bytes + 1):
        number += 1
        if len(raw) > max_line_bytes and not raw.endswith(b"\n"):
            line = InputLine(number, _rest_digest(file, raw))
            yield line.refused("line_too_long", f"it has more than {max_line_bytes} bytes")
        # Some programs put a byte order mark first in a file, several of which may be one now.
        elif text := raw.removeprefix(codecs.BOM_UTF8).strip():
            yield InputLine(number, text)


def _rest_digest(file: BinaryIO | gzip.GzipFile, begun: bytes) -> bytes:
    """Skip the rest of a line; returns the digest of the whole line."""
    digest = hashlib.sha256(begun)
    while rest := file.readline(_SKIPPED_BYTES):
        digest.update(rest)
        if rest.endswith(b"\n"):
            break
    return digest.digest()


def _with_unique_ids(lines: Iterable[InputLine]) -> Iterator[InputLine]:
    first_line: dict[str, int] = {}
    for line in lines:
        custom_id = line.parse().custom_id
        first = line.number if custom_id is None else first_line.setdefault(custom_id, line.number)
        if first == line.number:
            yield line
        else:
            message = f"its custom_id is that of line {first}"
            yield line.refused("duplicate_custom_id", message, custom_id)
