"""Syntaxes of tool calls in a model's text, by name and by chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from sametoken.serving.http.gemma_calls import GEMMA_MARKS, parse_gemma4
from sametoken.serving.http.harmony import CHANNEL, TEMPLATE_MARK, parse_harmony
from sametoken.serving.http.json_calls import (
    GRANITE_MARKS,
    HUNYUAN_TAGS,
    PYTHON_TAG,
    parse_granite,
    parse_hermes,
    parse_hunyuan,
    parse_llama3_json,
)
from sametoken.serving.http.marked_calls import END, START
from sametoken.serving.http.named_calls import (
    DEEPSEEK_MARKS,
    KIMI_MARKS,
    MISTRAL_MARKS,
    parse_deepseek_v3,
    parse_deepseek_v31,
    parse_kimi_k2,
    parse_mistral,
)
from sametoken.serving.http.parsed import FoundCall, Parsed, Parser
from sametoken.serving.http.pythonic_calls import OLMO_TAGS, parse_olmo3
from sametoken.serving.http.xml_calls import (
    MINIMAX_TAGS,
    SEED_TAGS,
    Schemas,
    glm_parser,
    minimax_m2_parser,
    qwen3_coder_parser,
    seed_oss_parser,
)


class CallSyntax(NamedTuple):
    """How a model writes calls.

    Attributes:
        parser: of answers with calls.
        mark: what begins an answer of calls, where other answers may have a constraint; None if
            none may.
        is_constrained: whether the mark is in what a grammar constrains.
    """

    parser: Parser
    mark: str | None = None
    is_constrained: bool = True


def named_parser(name: str) -> Parser:
    """For an answer that consists of the arguments of one function."""

    def parse(text: str, finished: bool) -> Parsed:
        return Parsed("", (FoundCall(name, text),))

    return parse


#: Makes the parser for given tools, by the values of ``--tool-call-parser``.
TOOL_PARSERS: Mapping[str, Callable[[Schemas], Parser]] = {
    "deepseek_v3": lambda _: parse_deepseek_v3,
    "deepseek_v31": lambda _: parse_deepseek_v31,
    "ernie45": lambda _: parse_hermes,
    "gemma4": lambda _: parse_gemma4,
    "glm45": glm_parser,
    "glm47": glm_parser,
    "granite": lambda _: parse_granite,
    "granite4": lambda _: parse_hermes,
    "hermes": lambda _: parse_hermes,
    "hunyuan_a13b": lambda _: parse_hunyuan,
    "kimi_k2": lambda _: parse_kimi_k2,
    "llama3_json": lambda _: parse_llama3_json,
    "minimax_m2": minimax_m2_parser,
    "mistral": lambda _: parse_mistral,
    "olmo3": lambda _: parse_olmo3,
    "openai": lambda _: parse_harmony,
    "qwen3_coder": qwen3_coder_parser,
    "seed_oss": seed_oss_parser,
}
#: What a call begins with, by the values of ``--tool-call-parser``. Llama's calls are mere JSON.
FIRST_MARKS: Mapping[str, str] = {
    "gemma4": GEMMA_MARKS[0],
    "granite": GRANITE_MARKS[0],
    "hunyuan_a13b": HUNYUAN_TAGS[0],
    "kimi_k2": KIMI_MARKS[0],
    "minimax_m2": MINIMAX_TAGS[0],
    "mistral": MISTRAL_MARKS[0],
    "olmo3": OLMO_TAGS[0],
    "openai": CHANNEL,
    "seed_oss": SEED_TAGS[0],
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), DEEPSEEK_MARKS[0]),
    **dict.fromkeys(("ernie45", "glm45", "glm47", "granite4", "hermes", "qwen3_coder"), START),
}
#: What parsers must see, special tokens or not; Llama's tag may be missing.
CALL_MARKS = (
    *(START, END, *DEEPSEEK_MARKS, *KIMI_MARKS, *MISTRAL_MARKS, *GEMMA_MARKS, *SEED_TAGS),
    *(*MINIMAX_TAGS, *OLMO_TAGS, *HUNYUAN_TAGS, GRANITE_MARKS[0]),
)


def parser_of_template(template: str) -> str | None:
    """The parser for a chat template's syntax of calls; None if it is unknown."""
    if TEMPLATE_MARK in template:
        return "openai"
    if START in template:
        # What is between the same tags differs.
        by_tag = {"<function=": "qwen3_coder", "<arg_key>": "glm45"}
        return next((name for tag, name in by_tag.items() if tag in template), "hermes")
    if DEEPSEEK_MARKS[0] in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    # Others have other calls between Hunyuan's tags.
    if f"{HUNYUAN_TAGS[0]}[" in template:
        return "hunyuan_a13b"
    for name in ("gemma4", "granite", "kimi_k2", "minimax_m2", "mistral", "olmo3", "seed_oss"):
        if FIRST_MARKS[name] in template:
            return name
    if PYTHON_TAG in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return None
