"""Models of the tools of a chat request, of their earlier calls, and of the choice among them.

A custom tool takes a text. Models write calls of functions, so they see it as a function with this
text as its one argument.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from sametoken.serving.http.custom_inputs import INPUT, input_arguments
from sametoken.serving.http.unions import Given, Strict, by_type

Name = Annotated[str, Field(min_length=1)]


class FunctionCall(Given):
    """A function call of an earlier assistant message."""

    name: str
    arguments: str = ""


class MessageToolCall(Given):
    """A tool call of an earlier message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomInput(Given):
    """The custom tool of an earlier call, and the text that it was called with."""

    name: str
    input: str


class MessageCustomCall(Given):
    """A call of a custom tool in an earlier message."""

    id: str = ""
    type: Literal["custom"]
    custom: CustomInput

    @property
    def function(self) -> FunctionCall:
        """The call as the template sees it."""
        return FunctionCall(name=self.custom.name, arguments=input_arguments(self.custom.input))


EarlierCall = Annotated[
    Annotated[MessageToolCall, Tag("FunctionTool")]
    | Annotated[MessageCustomCall, Tag("CustomTool")],
    by_type("FunctionTool", function="FunctionTool", custom="CustomTool"),
]


class FunctionDefinition(Given):
    """A function that the model may call; ``parameters`` is a JSON Schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Given):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class TextInput(Given):
    """Any text."""

    type: Literal["text"]


class InputGrammar(Given):
    """What describes the text that a tool takes."""

    definition: str
    syntax: Literal["lark", "regex"]


class GrammarInput(Given):
    """A text of a grammar."""

    type: Literal["grammar"]
    grammar: InputGrammar


class NamedCustom(Given):
    """A tool that takes a text, which a model knows by its name."""

    name: Name
    description: str | None = None


class CustomDefinition(NamedCustom):
    """A tool that takes a text, and which texts."""

    format: (
        Annotated[
            Annotated[TextInput, Tag("TextInput")] | Annotated[GrammarInput, Tag("GrammarInput")],
            by_type("TextInput", text="TextInput", grammar="GrammarInput"),
        ]
        | None
    ) = None


class CustomTool(Given):
    """A tool that takes a text, which the model may call."""

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def function(self) -> FunctionDefinition:
        """The tool as the model sees it. A regular expression also binds calls that are forced."""
        shown = self.custom.model_dump(exclude_unset=True, exclude={"format"})
        taken: dict[str, Any] = {"type": "string"}
        if isinstance(self.custom.format, GrammarInput):
            grammar = self.custom.format.grammar
            if grammar.syntax == "regex":
                taken["pattern"] = grammar.definition
            else:
                taken["description"] = f"A text of this Lark grammar:\n{grammar.definition}"
        parameters = {
            "type": "object",
            "properties": {INPUT: taken},
            "required": [INPUT],
            "additionalProperties": False,
        }
        return FunctionDefinition(**shown, parameters=parameters)


Tool = FunctionTool | CustomTool
Tools = Annotated[
    list[
        Annotated[
            Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[CustomTool, Tag("CustomTool")],
            by_type("FunctionTool", function="FunctionTool", custom="CustomTool"),
        ]
    ],
    Field(fail_fast=True),
]


class ToolName(Strict):
    """The name of a tool."""

    name: str


class NamedTool(Strict):
    """The function that must be called."""

    type: Literal["function"] = "function"
    function: ToolName


class NamedCustomTool(Strict):
    """The custom tool that must be called."""

    type: Literal["custom"]
    custom: ToolName

    @property
    def function(self) -> ToolName:
        """Its name as the model sees it."""
        return self.custom


_NAMED = Annotated[NamedTool, Tag("NamedTool")] | Annotated[NamedCustomTool, Tag("NamedCustomTool")]
_Named = Annotated[_NAMED, by_type("NamedTool", function="NamedTool", custom="NamedCustomTool")]


class AllowedNames(Strict):
    """The tools that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[_Named], Field(min_length=1, fail_fast=True)]


class AllowedTools(Strict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


NamedChoice = Annotated[
    _NAMED | Annotated[AllowedTools, Tag("AllowedTools")],
    by_type(
        "NamedTool", function="NamedTool", custom="NamedCustomTool", allowed_tools="AllowedTools"
    ),
]
