"""vLLM's arguments of ``LLM.generate`` and methods like it that this engine does not have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sametoken.errors import RequestError
from sametoken.types.option_values import require_known
from sametoken.types.sampling_params import ELSEWHERE, SamplingParams
from sametoken.types.vllm_options import OPTION_OF, as_keyword, read_options

#: The table. No value but the accepted ones has a meaning here.
VLLM_ARGUMENTS = read_options("""
prompt_adapter_request:
    adapters are LoRA's -> use lora_request
priority = 0:
    requests run in the order in which they came -> leave it out
tokenization_kwargs = {}:
    a text is tokenized as the tokenizer's files say -> give token ids
mm_processor_kwargs = {}:
    only text is served -> leave it out
prompt_token_ids:
    a list of token ids is a prompt -> give it in place of a text
guided_options_request:
    a constraint is a sampling parameter -> use SamplingParams(structured_outputs=...)
data_parallel_rank = 0:
    one engine runs all requests -> leave it out
trace_headers = {}:
    no traces are sent -> leave it out
""")

_FORMAT = "chat_template_content_format"
_ARGUMENT_OF = {name: about for about in VLLM_ARGUMENTS for name in about.names} | {
    _FORMAT: OPTION_OF[_FORMAT]
}
#: Where the caller wants a parameter of sampling.
_ELSEWHERE = {
    **ELSEWHERE,
    **{name: f"give SamplingParams({name}=...)" for name in SamplingParams.__slots__},
}

_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def takes_vllm_arguments(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """A method whose callers may give vLLM's arguments, with values that change nothing here.

    Others are refused with a ``RequestError``, as are sampling parameters, and names that the
    method does not know. Any other name is an option if it takes some (``**options``).
    """
    kinds = {name: one.kind for name, one in inspect.signature(method).parameters.items()}
    takes_options = inspect.Parameter.VAR_KEYWORD in kinds.values()
    known = [name for name, kind in kinds.items() if name != "self" and kind not in _ANY_NUMBER]

    @functools.wraps(method)
    def with_own_arguments(*arguments: _P.args, **given: _P.kwargs) -> _R:
        for name in [name for name in given if name not in known]:
            if name in _ARGUMENT_OF:
                _require_accepted(name, given.pop(name))
            elif not takes_options or name in _ELSEWHERE:
                require_known(method.__qualname__, [name], known, _ELSEWHERE)
        return method(*arguments, **given)

    return with_own_arguments


def _require_accepted(name: str, value: object) -> None:
    if value is not None:
        refusal = functools.partial(RequestError, param=name)
        _ARGUMENT_OF[name].require_accepted(value, as_keyword(name, value), refusal)
