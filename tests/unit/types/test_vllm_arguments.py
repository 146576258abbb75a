"""vLLM's arguments of methods: dropped where they change nothing, else refused by name."""

from __future__ import annotations

import inspect

import pytest

from sametoken.errors import RequestError
from sametoken.types.vllm_arguments import VLLM_ARGUMENTS, takes_vllm_arguments


class Model:
    @takes_vllm_arguments
    def generate(self, prompts, params=None, *, use_tqdm=False):
        """Complete."""
        return prompts, params, use_tqdm

    @takes_vllm_arguments
    def chat(self, messages, **options):
        return messages, options


MODEL = Model()
NAMES = [name for about in VLLM_ARGUMENTS for name in about.names]


def refused(call, **arguments) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call("x", **arguments)
    assert caught.value.param in arguments
    return caught.value


def test_the_method_stays_what_it_is():
    assert list(inspect.signature(Model.generate).parameters)[1:] == [
        "prompts",
        "params",
        "use_tqdm",
    ]
    assert Model.generate.__doc__ == "Complete."
    assert MODEL.generate("x", 1, use_tqdm=True) == ("x", 1, True)
    assert MODEL.generate(prompts="x") == ("x", None, False)
    assert MODEL.chat("x", tools=[]) == ("x", {"tools": []})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'prompts'"):
        MODEL.generate()


@pytest.mark.parametrize("name", NAMES)
def test_no_argument_that_means_something_is_dropped(name):
    assert MODEL.generate("x", **{name: None}) == ("x", None, False)
    assert MODEL.chat("x", **{name: None}) == ("x", {})
    for call in (MODEL.generate, MODEL.chat):
        error = refused(call, **{name: "nonsense"})
        assert error.cause.startswith(f"{name}='nonsense' is not offered: ")
        assert error.remedy


def test_values_that_describe_what_happens_anyway_are_taken():
    taken = {"priority": 0, "tokenization_kwargs": {}, "mm_processor_kwargs": {}}
    assert MODEL.generate("x", **taken) == ("x", None, False)
    assert MODEL.chat("x", chat_template_content_format="string") == ("x", {})
    assert "Use string" in str(refused(MODEL.chat, chat_template_content_format="openai"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0}, "has no 'temperature'. Give SamplingParams(temperature=...)"),
        ({"max_new_tokens": 16}, "has no 'max_new_tokens'. Use max_tokens"),
    ],
)
def test_sampling_parameters_are_no_arguments(arguments, message):
    for call, name in ((MODEL.generate, "Model.generate"), (MODEL.chat, "Model.chat")):
        assert str(refused(call, **arguments)) == f"{name} {message}"


def test_other_names_are_options_where_there_are_some():
    assert str(refused(MODEL.generate, use_tqmd=True)) == (
        "Model.generate has no 'use_tqmd'. Did you mean 'use_tqdm'?"
    )
    assert MODEL.chat("x", enable_thinking=False) == ("x", {"enable_thinking": False})
