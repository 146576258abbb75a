"""Training text for drafters: the target's own answers to prompts."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.errors import ConfigError, RequestError
from sametoken.io.files import require_writable
from sametoken.io.json_text import json_lines
from sametoken.train.options import require_seconds
from sametoken.train.text import messages_in, text_in, token_ids_in
from sametoken.types.outputs import RequestOutput
from sametoken.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sametoken.llm import LLM

# Requests per slot in one call of the engine. With fewer, slots idle while the last ones end.
_REQUESTS_PER_SLOT = 8
_REMEDY = (
    'give one a line: a text, {"prompt": text}, {"messages": [..]} or {"prompt_token_ids": [..]}'
)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt and how to answer it.

    Attributes:
        token_ids: the prompt as tokens, or empty.
        messages: otherwise the conversation to answer, or empty.
        text: otherwise a text: a user's message, or without a chat template a beginning.
        temperature: None for that of all prompts.
        seed: None for one that follows from the prompt's index in the file.
        place: line and file, for errors; empty if it comes from no file.
    """

    token_ids: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    temperature: float | None = None
    seed: int | None = None
    place: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Written:
    """Counts of answers and their tokens, and the seconds they took."""

    answers: int
    tokens: int
    seconds: float


def read_prompts(path: Path) -> list[TextPrompt]:
    """Read prompts, JSON lines, packed with gzip if the name ends in .gz.

    Args:
        path: a line is a text or an object with ``prompt``, ``messages`` or
            ``prompt_token_ids``, and if wanted ``temperature`` and ``seed``.

    Raises:
        ConfigError: the file is missing, malformed or empty.
    """
    prompts = []
    for number, row in json_lines(path):
        place = f"line {number} of {path}"
        try:
            prompts.append(replace(_prompt(row), place=place))
        except ValueError as error:
            raise ConfigError(f"{place} is no prompt ({error})", _REMEDY) from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts", _REMEDY)
    return prompts


def write_text(
    llm: LLM,
    prompts: Sequence[TextPrompt],
    output: Path,
    params: SamplingParams,
    *,
    max_seconds: float | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Written:
    """Answer prompts and write them as training text, one JSON object a line.

    Args:
        llm: the target.
        prompts: what to answer, in this order.
        output: the file; an existing one is replaced, once there are answers.
        params: of every answer; a prompt's own temperature and seed take precedence.
        max_seconds: start no more answers after this time.
        advance: receives the number of new answers.

    Raises:
        ConfigError: the file cannot be written, or ``max_seconds`` is not above 0.
        RequestError: a prompt is too long or outside the vocabulary, or it is a conversation and
            the target has no chat template; nothing was answered.
        SametokenError: none of the first prompts could be answered.
    """
    require_writable(output)
    require_seconds(max_seconds)
    chosen = [_params(one, index, params) for index, one in enumerate(prompts)]
    asked = [_answerable(llm, one, own) for one, own in zip(prompts, chosen, strict=True)]
    began, answers, tokens = time.monotonic(), 0, 0
    size = _REQUESTS_PER_SLOT * llm.resolved.config.max_num_seqs
    for first in range(0, len(asked), size):
        if max_seconds is not None and time.monotonic() - began > max_seconds:
            break
        outputs = llm.generate(asked[first : first + size], chosen[first : first + size])
        errors = [error for done in outputs if (error := done.outputs[0].error) is not None]
        if not first and len(errors) == len(outputs):
            raise errors[0]
        rows = [_row(done) for done in outputs if done.outputs[0].error is None]
        _write(output, rows, is_first=not first)
        tokens += sum(len(row["output_token_ids"]) for row in rows)
        answers += len(rows)
        advance(len(outputs))
    return Written(answers, tokens, time.monotonic() - began)


def _answerable(llm: LLM, prompt: TextPrompt, params: SamplingParams) -> dict[str, Any]:
    """A prompt for ``LLM.generate``, which will not refuse it."""
    try:
        asked = _prompt_of(llm, prompt)
        # Checks the request, which would begin with the first ``next``.
        llm.generate_stream(asked, params)
        return asked
    except RequestError as error:
        if not prompt.place:
            raise
        cause = f"{prompt.place} cannot be answered ({error.cause})"
        raise RequestError(cause, error.remedy) from error


def _row(done: RequestOutput) -> dict[str, list[int]]:
    return {
        "prompt_token_ids": list(done.prompt_token_ids),
        "output_token_ids": list(done.outputs[0].token_ids),
    }


def _write(output: Path, rows: Sequence[Mapping[str, Any]], *, is_first: bool) -> None:
    try:
        open_file = gzip.open if output.suffix == ".gz" else open
        with open_file(output, "wt" if is_first else "at", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written ({error})", "choose another file") from error


def _prompt(row: Any) -> TextPrompt:
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    own = {name: row[name] for name in ("temperature", "seed") if row.get(name) is not None}
    # The constructor refuses impossible values.
    SamplingParams(**own)
    if row.get("prompt_token_ids"):
        return TextPrompt(token_ids=token_ids_in(row, "prompt_token_ids"), **own)
    if row.get("messages"):
        return TextPrompt(messages=messages_in(row), **own)
    return TextPrompt(text=text_in(row, "prompt"), **own)


def _params(prompt: TextPrompt, index: int, params: SamplingParams) -> SamplingParams:
    temperature = params.temperature if prompt.temperature is None else prompt.temperature
    seed = prompt.seed if prompt.seed is not None else (params.seed or 0) + index
    return replace(params, temperature=temperature, seed=seed)


def _prompt_of(llm: LLM, prompt: TextPrompt) -> dict[str, Any]:
    if prompt.token_ids:
        return {"prompt_token_ids": prompt.token_ids}
    if prompt.text and not llm.get_tokenizer().chat_template:
        return {"prompt": prompt.text}
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    return {"prompt_token_ids": list(llm.render_chat(messages).token_ids)}
