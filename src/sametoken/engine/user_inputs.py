"""What a user gives to ``generate`` and ``chat``, in any of its forms, brought into one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from sametoken.errors import RequestError, require_unicode, shown
from sametoken.io.json_text import NotFiniteError, parse_json
from sametoken.text.tokenizer import Messages
from sametoken.types.outputs import RequestOutput
from sametoken.types.sampling_params import SamplingParams, plain_number

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as token ids, and as text if it was given as text."""

    text: str | None
    token_ids: tuple[int, ...]


#: A text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": [...]}`` or what
#: ``render_chat`` returns.
Prompt = str | Sequence[int] | Mapping[str, Any] | PromptTokens

#: Called with a prompt's index and output.
OnFinished = Callable[[int, RequestOutput], None]

#: By this clients know that a shorter conversation may fit.
TOO_LONG = "context_length_exceeded"

#: Types of a message's parts that are text, and the field that has it.
TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "text": "text",
}

#: Arguments of ``apply_chat_template``, in the tokenizer and in transformers, that are set already.
NO_VARIABLES = frozenset({"conversation", "messages", "self", "tokenize"})
_PROMPT_KEYS = ("prompt", "prompt_token_ids")
_PROMPT_FORMS = (
    'give a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}'
)
_MESSAGES_FORM = 'give a list of {"role": ..., "content": ...}, or several such lists'


def prompts_of(given: Any) -> list[Prompt]:
    """The prompts as a list; one prompt becomes a list of one.

    Raises:
        RequestError: it is neither a prompt nor a list.
    """
    if isinstance(given, str | Mapping | PromptTokens):
        return [given]
    several = _listed("prompts", given, f"{_PROMPT_FORMS}, or a list of them")
    is_one = bool(several) and all(isinstance(plain_number(one), int) for one in several)
    return [several] if is_one else several


def text_or_ids(prompt: Prompt, most: int) -> str | tuple[int, ...]:
    """The text of a prompt, or its token ids, of which only ``most`` are read.

    Raises:
        RequestError: it has another form, or more ids.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Mapping):
        ids = _without_array(prompt)
        if not isinstance(ids, list | tuple) or any(isinstance(i, str | Mapping) for i in ids[:1]):
            raise RequestError(
                f"a prompt of type {type(prompt).__name__} is not possible", _PROMPT_FORMS
            )
        return _ids(ids, most)
    unknown = [key for key in prompt if key not in _PROMPT_KEYS]
    if unknown or len(prompt) != 1:
        # As transformers' tokenizers return them, and their apply_chat_template.
        is_encoded = "input_ids" in prompt
        raise RequestError(
            f"a prompt with the keys {shown(list(prompt))} is not possible",
            'give its "input_ids" alone, the token ids'
            if is_encoded
            else 'give exactly one of "prompt" and "prompt_token_ids"',
        )
    if "prompt_token_ids" in prompt:
        return _ids(prompt["prompt_token_ids"], most)
    text = prompt["prompt"]
    if not isinstance(text, str):
        raise RequestError(
            f"a prompt text of type {type(text).__name__} is not possible", "give a string"
        )
    return text


def require_fitting(num_tokens: int, most: int) -> None:
    """Refuse a prompt of more than ``most`` tokens.

    Raises:
        RequestError: it has more.
    """
    if num_tokens > most:
        # Agents read how much they have to cut in the form of Anthropic or of OpenAI.
        raise too_long(
            f"{num_tokens} tokens > {most} maximum: this model's maximum context length is "
            f"{most + 1} tokens, and the answer needs one"
        )


def too_long(what: str) -> RequestError:
    """The refusal of a prompt that has ``what``."""
    return RequestError(
        f"the prompt has {what}",
        "shorten it, or raise max_model_len if the model's context is longer",
        code=TOO_LONG,
    )


def conversations_of(given: Any) -> list[Messages]:
    """The conversations as a list; one conversation becomes a list of one.

    Raises:
        RequestError: it is not a list.
    """
    several = _listed("messages", given, _MESSAGES_FORM)
    return [several] if all(isinstance(one, Mapping) for one in several) else several


def plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """The messages of a conversation as a chat template reads them.

    Their content is text, and the arguments of their calls are objects.

    Raises:
        RequestError: there are none, or one has no role, a content that is not text, or a call
            with a number that is not finite.
    """
    given = _listed("messages", messages, _MESSAGES_FORM)
    if not given or not all(isinstance(message, Mapping) for message in given):
        raise RequestError("a conversation needs messages", _MESSAGES_FORM)
    if any(not isinstance(message.get("role"), str) for message in given):
        raise RequestError("a message has no role", _MESSAGES_FORM)
    return [_plain_message(message) for message in given]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {**message, "content": content_text(message.get("content"))}
    calls = plain.get("tool_calls")
    if isinstance(calls, list | tuple):
        plain["tool_calls"] = list(map(_plain_call, calls))
    if not calls:
        # To some templates an empty value is a call too.
        plain.pop("tool_calls", None)
    return plain


def _plain_call(call: Any) -> Any:
    """A call with its arguments as an object, as clients of OpenAI's API have them as text.

    Text that is none, as a model leaves it where its answer is cut off, is an empty one: to refuse
    it would end the conversation, which has it in every later request.

    Raises:
        RequestError: a number is not finite, so that no template could write it as JSON.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if function is None or not isinstance(arguments, str):
        return call
    try:
        read = parse_json(arguments) if arguments else {}
    except NotFiniteError as error:
        raise RequestError(
            f"an earlier call of {shown(function.get('name'))} has arguments in which {error}",
            "use finite numbers",
            param="messages",
        ) from error
    except ValueError:
        read = None
    if not isinstance(read, dict):
        _logger.warning(
            "an earlier call of %s has arguments that are no JSON object (%d characters); the "
            "template reads {}",
            shown(function.get("name")),
            len(arguments),
        )
        read = {}
    return {**call, "function": {**function, "arguments": read}}


def content_text(content: Any) -> str:
    """The text of a message's content: a text, parts of texts, or None for the empty one.

    Raises:
        RequestError: it has another form, or a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"a message has a content of type {type(content).__name__}", "give a string"
        )
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    """The text of a part; a refusal is text of an earlier answer."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise RequestError(
            f"a message has a part of type {shown(kind)}",
            'only text is supported, as {"type": "text", "text": ...}',
            param="messages",
            code="unsupported",
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise RequestError(
            f"a message has a part of type {kind!r} whose {field!r} is no text",
            "give a string",
            param="messages",
        )
    return text


def template_variables(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a chat template, with those in ``chat_template_kwargs`` beside the others.

    The generation prompt is added unless ``add_generation_prompt`` says otherwise.

    Raises:
        RequestError: ``chat_template_kwargs`` is no mapping, or has what is no variable.
    """
    others = dict(options)
    inner = others.pop("chat_template_kwargs", None) or {}
    if not isinstance(inner, Mapping):
        raise RequestError(
            f"chat_template_kwargs={shown(inner)} is not possible", "map names to values"
        )
    variables = {"add_generation_prompt": True, **inner, **others}
    for name in variables:
        if not isinstance(name, str) or name in NO_VARIABLES:
            raise RequestError(f"a chat template has no variable {shown(name)}", "leave it out")
    return variables


def params_of(given: Any, num_prompts: int) -> list[SamplingParams]:
    """Sampling parameters for each prompt.

    Raises:
        RequestError: they have another type, or their number is not that of the prompts.
    """
    if isinstance(given, SamplingParams):
        return [given] * num_prompts
    several = _listed("sampling parameters", given, "give SamplingParams, or a list of them")
    if len(several) != num_prompts:
        raise RequestError(
            f"{len(several)} sampling parameters were given for {num_prompts} prompts",
            "give one for all, or one per prompt",
        )
    return several


def require_level(level: object) -> None:
    """Refuse a level of sleep that there is not.

    Raises:
        RequestError: it is neither 1 nor 2.
    """
    if level not in (1, 2):
        raise RequestError(f"there is no sleep of level {shown(level)}", "use 1 or 2")


def parts_of(given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Names of parts that wake up; one name becomes a tuple of one.

    Raises:
        RequestError: they are no list of texts.
    """
    if given is None:
        return None
    remedy = 'give "weights", "kv_cache" or a list of them'
    names = [given] if isinstance(given, str) else _listed("tags", given, remedy)
    if not all(isinstance(name, str) for name in names):
        raise RequestError(f"tags={shown(given)} is not possible", remedy)
    return tuple(names)


def require_request_id(request_id: object) -> None:
    """Refuse an id that is no text, or none that can be written as UTF-8.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(request_id, str):
        raise RequestError(f"request_id={shown(request_id)} is not possible", "give a string")
    require_unicode("request_id", request_id)


def _ids(given: Any, most: int) -> tuple[int, ...]:
    ids = _without_array(given)
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise RequestError(
            f"prompt_token_ids of type {type(given).__name__} is not possible",
            "give a list of integers",
        )
    try:
        require_fitting(len(ids) if isinstance(ids, Sized) else 0, most)
        # The iterable may be infinite: read only enough to refuse it.
        token_ids = tuple(itertools.islice(ids, most + 1))
    except TypeError as error:
        # What says that it is Sized and Iterable may raise on both.
        raise RequestError(
            f"prompt_token_ids cannot be read ({shown(error)})", "give a list of integers"
        ) from error
    # Whole-list built-ins: a Python loop is slow for the longest prompts.
    return token_ids if set(map(type, token_ids)) <= {int} else tuple(map(plain_number, token_ids))


def _listed(name: str, given: Any, remedy: str) -> list[Any]:
    several = _without_array(given)
    if isinstance(several, str | bytes | Mapping) or not isinstance(several, Iterable):
        raise RequestError(f"{name} of type {type(given).__name__} are not possible", remedy)
    return list(several)


def _without_array(given: Any) -> Any:
    """The nested lists of an array of numpy or torch; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given
