"""Training text for drafters: the target's own answers to prompts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, RequestError
from sametoken.io.files import require_writable
from sametoken.io.journal import Journal, write_whole
from sametoken.io.json_text import json_lines
from sametoken.train.options import require_seconds
from sametoken.train.text import messages_in, text_in, token_ids_in
from sametoken.types.outputs import RequestOutput
from sametoken.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sametoken.engine.input_processor import InputProcessor
    from sametoken.engine.user_inputs import PromptTokens
    from sametoken.llm import LLM

# Requests per slot in one call of the engine. With fewer, slots idle while the last ones end.
_REQUESTS_PER_SLOT = 8
# Of keys and rows of kept answers.
_FORMAT = "sametoken-text-1"
_KEEP_EVERY_S = 1.0
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
    """What came of prompts.

    Attributes:
        answers, tokens, seconds: new answers, their tokens, and the time they took.
        kept: answers of earlier runs.
        errors: of the answers that failed, which the file does not have.
    """

    answers: int
    tokens: int
    seconds: float
    kept: int
    errors: Sequence[Exception]


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


def open_answers(output: Path, config: EngineConfig, params: SamplingParams) -> Journal:
    """Open ``OUTPUT.parts``, where answers are kept until all are there.

    Args:
        output: the file that ``write_text`` will write.
        config: of the target.
        params: of every answer.

    Raises:
        ConfigError: the output cannot be written; or as ``Journal``, as where an earlier run left
            answers with other settings.
    """
    require_writable(output)
    own = {name: getattr(params, name) for name in ("max_tokens", "temperature", "seed")}
    settings = {"format": _FORMAT} | config.result_settings | own
    return Journal(output.with_name(f"{output.name}.parts"), settings)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as the engine takes it, its parameters, and the key of its answer."""

    prompt: PromptTokens
    params: SamplingParams
    key: str
    place: str


def ask(
    inputs: InputProcessor, prompts: Sequence[TextPrompt], params: SamplingParams
) -> list[Asked]:
    """Make requests of prompts.

    Args:
        inputs: of the target, which need not be loaded.
        prompts: what to answer, in this order.
        params: of every answer; a prompt's own temperature and seed take precedence.

    Raises:
        RequestError: a prompt is too long or outside the vocabulary, or it is a conversation and
            the target has no chat template.
    """
    return [_asked(inputs, prompt, _params(prompt, i, params)) for i, prompt in enumerate(prompts)]


def write_text(
    llm: LLM,
    asked: Sequence[Asked],
    output: Path,
    kept: Journal,
    *,
    max_seconds: float | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Written:
    """Answer prompts and write them as training text, one JSON object a line.

    Args:
        llm: the target.
        asked: what to answer.
        output: the file; it is written whole, once the answers are there.
        kept: from ``open_answers``. What an earlier run answered is not answered again; of an
            interrupted run the finished answers stay there.
        max_seconds: start no more answers after this time.
        advance: receives how many further prompts are done with: first those that have an answer,
            or that of an equal one, then each that is answered or fails.

    Raises:
        ConfigError: a file cannot be written, or ``max_seconds`` is not above 0.
        RequestError: memory leaves no room for a prompt of this length; nothing was answered.
        SametokenError: none of the first prompts could be answered.
    """
    require_seconds(max_seconds)
    for one in asked:
        with _placed(one.place):
            llm.inputs.process("", one.prompt, one.params)
    num_before = sum(one.key in kept for one in asked)
    left = list({one.key: one for one in asked if one.key not in kept}.values())
    advance(len(asked) - len(left))
    began, keeper = time.monotonic(), _Keeper(kept, advance)
    size = _REQUESTS_PER_SLOT * llm.resolved.config.max_num_seqs
    for first in range(0, len(left), size):
        if max_seconds is not None and time.monotonic() - began > max_seconds:
            break
        keeper.answer(llm, left[first : first + size])
    answered = [one.key for one in asked if one.key in kept]
    if answered:
        write_whole(output, map(kept.__getitem__, answered))
        kept.remove()
    seconds = time.monotonic() - began
    num_new = len(answered) - num_before
    return Written(num_new, keeper.tokens, seconds, num_before, keeper.errors)


class _Keeper:
    """Answers prompts, and keeps the answers on disk soon after each is finished."""

    def __init__(self, kept: Journal, advance: Callable[[int], None]) -> None:
        self.tokens = 0
        self.errors: list[Exception] = []
        self._kept = kept
        self._advance = advance
        self._finished: list[tuple[str, bytes]] = []
        self._kept_at = time.monotonic()

    def answer(self, llm: LLM, asked: Sequence[Asked]) -> None:
        """Answer prompts in one call of the engine; an answer that fails is not kept.

        Raises:
            SametokenError: all of them fail, and no answer was kept before.
        """

        def take(index: int, done: RequestOutput) -> None:
            self._take(asked[index].key, done)

        prompts, params = [one.prompt for one in asked], [one.params for one in asked]
        try:
            llm.generate(prompts, params, on_finished=take)
        finally:
            self._keep()
        if self.errors and not len(self._kept):
            raise self.errors[0]

    def _take(self, key: str, done: RequestOutput) -> None:
        (answer,) = done.outputs
        if answer.error is None:
            row = {"prompt_token_ids": done.prompt_token_ids, "output_token_ids": answer.token_ids}
            self._finished.append((key, json.dumps(row).encode()))
            self.tokens += len(answer.token_ids)
        else:
            self.errors.append(answer.error)
        self._advance(1)
        # The disk is waited for, so that answers go there together.
        if time.monotonic() - self._kept_at > _KEEP_EVERY_S:
            self._keep()

    def _keep(self) -> None:
        self._kept.append(self._finished)
        self._finished.clear()
        self._kept_at = time.monotonic()


def _asked(inputs: InputProcessor, prompt: TextPrompt, params: SamplingParams) -> Asked:
    with _placed(prompt.place):
        tokens = _tokens_of(inputs, prompt)
        inputs.process("", tokens, params)
    key = hashlib.sha256(f"{tokens.token_ids} {params}".encode()).hexdigest()
    return Asked(tokens, params, key, prompt.place)


@contextmanager
def _placed(place: str) -> Iterator[None]:
    """Name the line of a prompt that cannot be answered."""
    try:
        yield
    except RequestError as error:
        if not place:
            raise
        cause = f"{place} cannot be answered ({error.cause})"
        raise RequestError(cause, error.remedy) from error


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


def _tokens_of(inputs: InputProcessor, prompt: TextPrompt) -> PromptTokens:
    if prompt.token_ids:
        return inputs.tokenize({"prompt_token_ids": prompt.token_ids})
    tokenizer = inputs.tokenizer
    if prompt.text and not (tokenizer and tokenizer.chat_template):
        return inputs.tokenize(prompt.text)
    return inputs.tokenize_chat(prompt.messages or [{"role": "user", "content": prompt.text}])
