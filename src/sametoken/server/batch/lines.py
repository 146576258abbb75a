"""OpenAI's batch format: what a line of the input asks for, what a line of the output says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sametoken.errors import RequestError
from sametoken.server.schemas import Text

_KEY_DIGITS = 32


class BatchRequest(BaseModel):
    """A line of the input; the body is checked by the endpoint that it is for."""

    model_config = ConfigDict(strict=True)

    custom_id: Text
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class BatchResponse(BaseModel):
    """What the endpoint answered; ``body`` of a status other than 200 says what is wrong."""

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
        raw: its bytes, without the line's end.
    """

    number: int
    raw: bytes

    @cached_property
    def key(self) -> str:
        """Names the line's contents: a line that was changed is another one."""
        return hashlib.sha256(self.raw).hexdigest()[:_KEY_DIGITS]

    @property
    def result_id(self) -> str:
        """The id of its result."""
        return f"batch_req_{self.key}"

    def parse(self) -> BatchRequest | BatchResult:
        """The request, or the result that says why there is none."""
        try:
            given = json.loads(self.raw)
        except ValueError as error:
            return self._refusal(None, "invalid_json", f"it is not JSON: {error}")
        custom_id = given.get("custom_id") if isinstance(given, dict) else None
        try:
            return BatchRequest.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            named = custom_id if isinstance(custom_id, str) else None
            return self._refusal(named, "invalid_request", f"{where}: {first['msg']}")

    def _refusal(self, custom_id: str | None, code: str, message: str) -> BatchResult:
        error = BatchError(code=code, message=f"line {self.number}: {message}")
        return BatchResult(id=self.result_id, custom_id=custom_id, error=error)


def read_input(path: Path) -> list[InputLine]:
    """The lines of a file, in order; each custom_id names one of them.

    Raises:
        RequestError: the file cannot be read, or a custom_id is on two lines.
    """
    try:
        with path.open("rb") as file:
            lines = [InputLine(number, raw) for number, raw in _not_blank(file)]
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error})", "name a file of requests") from error
    _require_unique_ids(lines)
    return lines


def to_line(result: BatchResult) -> bytes:
    """A result as a line of the output, without the line's end."""
    return json.dumps(result.model_dump()).encode()


def _not_blank(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line.strip()


def _require_unique_ids(lines: Iterable[InputLine]) -> None:
    first_line: dict[str, int] = {}
    for line in lines:
        custom_id = line.parse().custom_id
        if custom_id is None:
            continue
        if custom_id in first_line:
            raise RequestError(
                f"custom_id {custom_id!r} is on line {first_line[custom_id]} and on line "
                f"{line.number}",
                "give every line an id of its own",
            )
        first_line[custom_id] = line.number
