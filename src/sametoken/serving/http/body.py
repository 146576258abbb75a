"""Request bodies: checked for size before parsing, then parsed and validated off the event loop."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from sametoken.io.json_text import parse_json
from sametoken.serving.http.errors import ApiError, invalid, invalid_field

#: Members, objects and lists of a body. Parsing one costs far more than its bytes.
MAX_NODES = 2**16
#: Digits of a number. Parsing takes quadratic time.
MAX_DIGITS = 200
#: Bytes up to which a body is parsed on the event loop, which is faster than a thread.
_SMALL = 2**14
_QUOTE, _OPENINGS = ord('"'), b"[{:"
#: pydantic's names for the types of a union field; other names have brackets.
_FORMS = frozenset((
    "str", "constrained-str", "int", "bool", "dict",
    "NamedTool", "NamedCustomTool", "AllowedTools",
    "FunctionTool", "CustomTool", "NamespaceTool", "OtherTool", "TextInput", "GrammarInput",
    "TextBlock", "ThinkingBlock", "ToolUseBlock", "ToolResultBlock", "OtherBlock",
))  # fmt: skip
_NOT_FINITE = re.compile(rb"[NI]")
# Both are anchored at the start of a number, so that the time is linear in the text. Up to
# MAX_DIGITS digits with an exponent of one or two are finite.
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{%d}" % (MAX_DIGITS + 1))
_LARGE_NUMBER = re.compile(rb"(?<![0-9.])[0-9]++(?:\.[0-9]++)?[eE]\+?[0-9]{3,}")
# One thread, so that only one large body is parsed at a time.
_reader = ThreadPoolExecutor(1, "read-body")


def read_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON in UTF-8, nests deeper than 200, or is beyond a limit.
    """
    require_bounded(body)
    return parse_json(body)


def require_bounded(text: bytes) -> None:
    """Check the limits of a JSON text before it is parsed.

    Raises:
        ValueError: it has more than ``MAX_NODES`` members, objects and lists, or a number of more
            than ``MAX_DIGITS`` digits.
    """
    _require_bounded(_without_strings(text))


def _require_bounded(bare: bytes) -> None:
    num_nodes = sum(bare.count(bytes([opening])) for opening in _OPENINGS)
    if num_nodes > MAX_NODES:
        raise ValueError(
            f"it has {num_nodes} members, objects and lists and at most {MAX_NODES} are allowed"
        )
    if _LONG_NUMBER.search(bare):
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")


def _require_finite(bare: bytes) -> None:
    """Refuse infinities in the text of a body, since a model may take any value for a field."""
    large = any(float(found[0]) == float("inf") for found in _LARGE_NUMBER.finditer(bare))
    if large or _NOT_FINITE.search(bare):
        raise ValueError("a number is not finite")


def _without_strings(body: bytes) -> bytes:
    """The text outside of strings; vectorized, since the body may be large."""
    text = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    quotes_so_far = np.cumsum(text == _QUOTE, dtype=np.uint8)
    # Counted modulo 256, which keeps the parity.
    bare: bytes = text[quotes_so_far % 2 == 0].tobytes()
    return bare


class JsonRoute(APIRoute):
    """A route whose JSON body is parsed by ``read_model``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See ``APIRoute``."""
        handle = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handle
        model: type[BaseModel] = field.field_info.annotation  # type: ignore[assignment]

        async def handle_read(request: Request) -> Response:
            body = await request.body()
            _require_plain(request.headers.get("content-encoding", ""))
            if not body or not _is_json(request.headers.get("content-type", "")):
                return await handle(request)
            if len(body) <= _SMALL:
                value = read_model(model, body)
            else:
                loop = asyncio.get_running_loop()
                value = await loop.run_in_executor(_reader, read_model, model, body)
            return await handle(_ReadRequest(request, body, value))

        return handle_read


def read_model(model: type[BaseModel], body: bytes) -> BaseModel:
    """Parse and validate a body as a model.

    Raises:
        ApiError: it is not JSON, beyond a limit, or invalid for the model.
    """
    try:
        bare = _without_strings(body)
        _require_bounded(bare)
        _require_finite(bare)
        # Some clients put a byte order mark first.
        return model.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        fault = max(faults, key=_closeness)
        if fault["type"] == "json_invalid":
            raise invalid(f"the body is not JSON: {_json_cause(fault)}") from error
        # Without pydantic's names for the types of a union.
        parts = map(str, fault["loc"])
        where = [part for part in parts if "[" not in part and part not in _FORMS]
        raise invalid_field(where, fault) from error
    except ValueError as error:
        message = f"the body cannot be served: {error}. Send less, in finite numbers"
        raise invalid(message) from error


def _json_cause(fault: Mapping[str, Any]) -> str:
    cause = str(fault["ctx"]["error"])
    # The parser's words for a lone surrogate, which json.dumps writes for a cut text.
    return f"{cause}, half of a surrogate pair" if "hex escape" in cause else cause


def _closeness(fault: Mapping[str, Any]) -> tuple[bool, int, int, bool]:
    """How close a value comes to the type of a union that found this fault."""
    kind, place = fault["type"], fault["loc"]
    index = place[-1] if place and isinstance(place[-1], int) else 0
    return kind.endswith("too_long"), len(place), index, not kind.endswith("_type")


class _ReadRequest(Request):
    """A request with a parsed body; FastAPI accepts an instance of the model unchanged."""

    def __init__(self, request: Request, body: bytes, value: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._value = value

    async def json(self) -> Any:
        """The body as its model."""
        return self._value


def _require_plain(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(415, "the body has a Content-Encoding. Send it without compression")


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
