"""Tools of a request for a response: the functions and custom tools that its client runs.

A namespace groups them, as Codex sends those of an MCP server. The model sees each under a name
that begins with the namespace's; a call has the two apart. Tools of other types would be run by a
server that has them. They are left out, as agents send them unasked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, Tag

from sametoken.errors import shown
from sametoken.serving.http.errors import invalid
from sametoken.serving.http.other_tools import OtherTool, tell_of_others
from sametoken.serving.http.tool_schemas import (
    CustomDefinition,
    FunctionDefinition,
    GrammarInput,
    InputGrammar,
    NamedCustom,
    TextInput,
    Tool,
)
from sametoken.serving.http.tool_schemas import CustomTool as ChatCustomTool
from sametoken.serving.http.tool_schemas import FunctionTool as ChatFunctionTool
from sametoken.serving.http.unions import Given, by_type


class FunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class GrammarFormat(InputGrammar):
    """A text of a grammar."""

    type: Literal["grammar"]


class CustomTool(NamedCustom):
    """A tool that takes a text, which the model may call."""

    type: Literal["custom"]
    format: (
        Annotated[
            Annotated[TextInput, Tag("TextInput")] | Annotated[GrammarFormat, Tag("GrammarInput")],
            by_type("TextInput", text="TextInput", grammar="GrammarInput"),
        ]
        | None
    ) = None


_Function = Annotated[FunctionTool, Tag("FunctionTool")]
_Custom = Annotated[CustomTool, Tag("CustomTool")]
_Other = Annotated[OtherTool, Tag("OtherTool")]


class NamespaceTool(Given):
    """Functions and custom tools under a name of their own."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: Annotated[
        list[
            Annotated[
                _Function | _Custom | _Other,
                by_type("OtherTool", function="FunctionTool", custom="CustomTool"),
            ]
        ],
        Field(fail_fast=True),
    ]


ResponseTool = Annotated[
    _Function | _Custom | Annotated[NamespaceTool, Tag("NamespaceTool")] | _Other,
    by_type("OtherTool", function="FunctionTool", custom="CustomTool", namespace="NamespaceTool"),
]


class CalledName(NamedTuple):
    """What a client calls a function or a custom tool.

    Attributes:
        name: within the namespace.
        namespace: None of a tool without one.
        is_custom: whether it is a custom tool.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def shown_to_model(self) -> str:
        """The name in the chat template, as MCP's clients join the two."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


def without_others(
    tools: Iterable[ResponseTool],
) -> list[FunctionTool | CustomTool | NamespaceTool]:
    """The tools that the model may call, as they were sent."""
    known: list[FunctionTool | CustomTool | NamespaceTool] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            members = [one for one in tool.tools if not isinstance(one, OtherTool)]
            known.append(tool.model_copy(update={"tools": members}))
        elif not isinstance(tool, OtherTool):
            known.append(tool)
    return known


def called_names(tools: Iterable[ResponseTool]) -> dict[str, CalledName]:
    """What the client calls each tool, by the name that the model sees."""
    return {name.shown_to_model: name for name, _ in _called(tools)}


def chat_tools(tools: Sequence[ResponseTool]) -> list[Tool]:
    """The tools of a chat request. A line in the log tells of tools that are left out.

    Raises:
        ApiError: the model would see two under one name.
    """
    members = [one for tool in tools if isinstance(tool, NamespaceTool) for one in tool.tools]
    tell_of_others((*tools, *members))
    seen: dict[str, CalledName] = {}
    found = []
    for called, tool in _called(tools):
        name = called.shown_to_model
        if seen.setdefault(name, called) != called:
            raise invalid(
                f"tools have two functions that the model would see as {shown(name)}. Rename one",
                "tools",
            )
        found.append(_chat_tool(tool, name))
    return found


def _chat_tool(tool: FunctionTool | CustomTool, name: str) -> Tool:
    fields: dict[str, Any] = tool.model_dump(exclude_unset=True, exclude={"type", "format"})
    fields["name"] = name
    if isinstance(tool, FunctionTool):
        return ChatFunctionTool(type="function", function=FunctionDefinition(**fields))
    if isinstance(tool.format, GrammarFormat):
        grammar = InputGrammar(definition=tool.format.definition, syntax=tool.format.syntax)
        fields["format"] = GrammarInput(type="grammar", grammar=grammar)
    return ChatCustomTool(type="custom", custom=CustomDefinition(**fields))


def _called(
    tools: Iterable[ResponseTool],
) -> Iterable[tuple[CalledName, FunctionTool | CustomTool]]:
    for tool in tools:
        namespace = tool.name if isinstance(tool, NamespaceTool) else None
        for one in tool.tools if isinstance(tool, NamespaceTool) else (tool,):
            if isinstance(one, FunctionTool | CustomTool):
                yield CalledName(one.name, namespace, isinstance(one, CustomTool)), one
