"""Tools of a request for a response: the functions that its client runs.

A namespace groups functions, as Codex sends those of an MCP server. The model sees each under a
name that begins with the namespace's; a call has the two apart. Tools of other types would be run
by a server that has them, or take no JSON. They are left out, as agents send them unasked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, Tag

from sametoken.errors import shown
from sametoken.serving.http.errors import invalid
from sametoken.serving.http.other_tools import OtherTool, by_type, tell_of_others
from sametoken.serving.http.schemas import MAX_TOOLS, FunctionDefinition, Tool


class FunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


_Function = Annotated[FunctionTool, Tag("FunctionTool")]
_Other = Annotated[OtherTool, Tag("OtherTool")]


class NamespaceTool(BaseModel):
    """Functions under a name of their own."""

    model_config = ConfigDict(strict=True)

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: Annotated[
        list[Annotated[_Function | _Other, by_type("OtherTool", function="FunctionTool")]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]


ResponseTool = Annotated[
    _Function | Annotated[NamespaceTool, Tag("NamespaceTool")] | _Other,
    by_type("OtherTool", function="FunctionTool", namespace="NamespaceTool"),
]


class CalledName(NamedTuple):
    """What a client calls a function.

    Attributes:
        name: within the namespace.
        namespace: None of a function without one.
    """

    name: str
    namespace: str | None = None

    @property
    def shown_to_model(self) -> str:
        """The name in the chat template, as MCP's clients join the two."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


def without_others(tools: Iterable[ResponseTool]) -> list[FunctionTool | NamespaceTool]:
    """The tools that the model may call, as they were sent."""
    known: list[FunctionTool | NamespaceTool] = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            known.append(tool)
        elif isinstance(tool, NamespaceTool):
            members = [one for one in tool.tools if isinstance(one, FunctionTool)]
            known.append(tool.model_copy(update={"tools": members}))
    return known


def called_names(tools: Iterable[ResponseTool]) -> dict[str, CalledName]:
    """What the client calls each function, by the name that the model sees."""
    return {name.shown_to_model: name for name, _ in _functions(tools)}


def chat_tools(tools: Sequence[ResponseTool]) -> list[Tool]:
    """The functions for a chat template. A line in the log tells of tools that are left out.

    Raises:
        ApiError: there are too many, or the model would see two under one name.
    """
    members = [one for tool in tools if isinstance(tool, NamespaceTool) for one in tool.tools]
    tell_of_others((*tools, *members))
    seen: dict[str, CalledName] = {}
    found = []
    for called, function in _functions(tools):
        name = called.shown_to_model
        if seen.setdefault(name, called) != called:
            raise invalid(
                f"tools have two functions that the model would see as {shown(name)}. Rename one",
                "tools",
            )
        fields = function.model_dump(exclude_unset=True, exclude={"type"})
        found.append(Tool(type="function", function=FunctionDefinition(**fields | {"name": name})))
    if len(found) > MAX_TOOLS:
        raise invalid(f"tools have {len(found)} functions. Send at most {MAX_TOOLS}", "tools")
    return found


def _functions(tools: Iterable[ResponseTool]) -> Iterable[tuple[CalledName, FunctionTool]]:
    for tool in tools:
        namespace = tool.name if isinstance(tool, NamespaceTool) else None
        for one in tool.tools if isinstance(tool, NamespaceTool) else (tool,):
            if isinstance(one, FunctionTool):
                yield CalledName(one.name, namespace), one
