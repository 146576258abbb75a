"""How a server constrains answers. Imports no torch, so that CLI help stays cheap."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.types.option_values import (
    json_object,
    known_keys,
    option,
    require_choices,
    require_types,
)

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
        """Read the option's JSON.

        Raises:
            ConfigError: it is no JSON object, a key is unknown, or a value is impossible.
        """
        given = json_object(text, _NAME, '{"enable_in_reasoning": true}')
        return cls(**known_keys(cls, given, _NAME))
