"""How a server constrains answers. Imports no torch, so that CLI help stays cheap."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.types.option_values import from_json, option, require_choices, require_types

_NAME = "structured_outputs_config"


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """The keys of ``structured_outputs_config``, with vLLM's names.

    Raises:
        ConfigError: a value is impossible.
    """

    backend: str = option("auto", "what compiles grammars", choices=("auto", "xgrammar"))
    enable_in_reasoning: bool = option(
        False, "constrain answers from their first token on, so that they have no reasoning"
    )

    def __post_init__(self) -> None:
        require_types(self, f"{_NAME}.")
        require_choices(self)

    @classmethod
    def parse(cls, text: str) -> StructuredOutputsConfig:
        """Read the option's JSON; errors as in ``from_json``."""
        return from_json(cls, text, _NAME, '{"enable_in_reasoning": true}')
