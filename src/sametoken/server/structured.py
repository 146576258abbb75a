"""The form that an answer must have: every way to ask for one, made into ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sametoken.core.structured_outputs import StructuredOutputs
from sametoken.server.errors import ApiError, invalid
from sametoken.server.schemas import ResponseFormat, SamplingFields, StructuredOutputsField


def structured_outputs(request: SamplingFields) -> StructuredOutputs | None:
    """The constraint that a request asks for, under whichever name.

    Raises:
        ApiError: it asks in two ways, or for something that is no constraint.
        RequestError: the constraint is empty.
    """
    found = {
        name: constraint
        for name, constraint in (
            ("response_format", _of_response_format(request.response_format)),
            ("structured_outputs", _of_field(request.structured_outputs)),
            ("guided_json", _json(request.guided_json)),
            ("guided_regex", _given("regex", request.guided_regex)),
            ("guided_choice", _given("choice", request.guided_choice)),
            ("guided_grammar", _given("grammar", request.guided_grammar)),
        )
        if constraint is not None
    }
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(f"{first} and {second} contradict each other. Send one of them", second)
    return next(iter(found.values()), None)


def json_schema(schema: dict[str, Any]) -> StructuredOutputs:
    """JSON that a schema allows."""
    return StructuredOutputs(json_schema=json.dumps(schema))


def _of_response_format(asked: ResponseFormat | None) -> StructuredOutputs | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutputs(json_object=True)
    kinds: dict[str, Callable[[Any], StructuredOutputs]] = {
        "json_schema": lambda wrapped: json_schema(wrapped.schema_),
        "regex": lambda text: StructuredOutputs(regex=text),
        "grammar": lambda text: StructuredOutputs(grammar=text),
    }
    value = getattr(asked, asked.type)
    if value is None:
        raise invalid(
            f"response_format of type {asked.type} lacks {asked.type!r}. Add it", "response_format"
        )
    return kinds[asked.type](value)


def _of_field(asked: StructuredOutputsField | None) -> StructuredOutputs | None:
    if asked is None:
        return None
    schema = _json(asked.json_)
    choice = None if asked.choice is None else tuple(asked.choice)
    return StructuredOutputs(
        json_schema=schema.json_schema if schema else None,
        json_object=bool(asked.json_object),
        regex=asked.regex,
        grammar=asked.grammar,
        choice=choice,
    )


def _json(schema: str | dict[str, Any] | None) -> StructuredOutputs | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        return StructuredOutputs(json_schema=schema)
    return json_schema(schema)


def _given(name: str, value: str | list[str] | None) -> StructuredOutputs | None:
    if value is None:
        return None
    settled: Any = tuple(value) if isinstance(value, list) else value
    return StructuredOutputs(**{name: settled})


def refuse_both(structured: StructuredOutputs | None, tool_choice: str) -> None:
    """A forced tool call is a constraint of its own.

    Raises:
        ApiError: the request has another one.
    """
    if structured is not None:
        raise ApiError(
            400,
            f"tool_choice {tool_choice} and a form for the answer contradict each other. "
            "Send one of them",
            param="tool_choice",
        )
