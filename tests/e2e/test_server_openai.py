"""The API as its users meet it: OpenAI's own client against a server with a tiny model."""

from __future__ import annotations

import asyncio
import json
import re
import time

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helpers.chat_model import SCHEMA, byte_tokenizer, write_chat_model
from helpers.http_server import TOY_ENGINE, running_server
from sametoken import LLM, SamplingParams
from sametoken.errors import RequestError

NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3}
PROMPT = "the inner the other the inner the other the"
USER = [{"role": "user", "content": "Say the inner the other the inner."}]
ADD = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def server(model):
    with running_server(
        model, engine={"speculative_config": NGRAM}, served_model_name=("tiny",)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def offline(model):
    """The same model without a server and without speculation: what every answer must be."""
    return LLM(str(model), **TOY_ENGINE)


def answer(offline: LLM, prompt, **params):
    (output,) = offline.generate([prompt], SamplingParams(**params))
    return output.outputs[0]


def whole_text(stream) -> str:
    return "".join(choice.text for chunk in stream for choice in chunk.choices)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_completions_are_the_offline_answer(client, offline, temperature):
    params = {"temperature": temperature, "seed": 11, "max_tokens": 40}
    expected = answer(offline, PROMPT, **params)
    found = client.completions.create(model="tiny", prompt=PROMPT, **params)
    assert isinstance(found, Completion)
    assert found.choices[0].text == expected.text
    assert found.usage.completion_tokens == len(expected.token_ids)
    stream = client.completions.create(model="tiny", prompt=PROMPT, stream=True, **params)
    assert whole_text(stream) == expected.text


def test_the_context_ends_an_answer_and_refuses_a_prompt(client, offline):
    context = offline.resolved.max_model_len
    more = {"temperature": 0.0, "max_tokens": 5 * context}
    forever = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}

    def said(num_words: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "cat " * num_words}]

    short, longer = (len(offline.render_chat(said(n)).token_ids) for n in (1, 2))
    messages = said((context - short) // (longer - short) - 1)
    chat = list(offline.render_chat(messages).token_ids)
    expected = answer(offline, {"prompt_token_ids": chat}, ignore_eos=True, **more)
    assert (len(chat) + len(expected.token_ids), expected.finish_reason) == (context, "length")
    found = [
        client.completions.create(model="tiny", prompt=chat, **more, **forever),
        client.chat.completions.create(model="tiny", messages=messages, **more, **forever),
    ]
    for one in found:
        assert tuple(one.choices[0].token_ids) == expected.token_ids
        assert one.choices[0].finish_reason == "length"

    ids = (chat * 2)[:context]
    with pytest.raises(RequestError, match=f"> {context - 1} maximum") as refused:
        answer(offline, {"prompt_token_ids": ids})
    with pytest.raises(openai.BadRequestError, match=re.escape(refused.value.cause)):
        client.completions.create(model="tiny", prompt=ids)
    with pytest.raises(openai.BadRequestError, match=f"> {context - 1} maximum"):
        client.chat.completions.create(model="tiny", messages=messages * 20)


def test_speculation_of_a_request_changes_its_speed_alone(client, offline):
    params = {"temperature": 0.0, "max_tokens": 48}
    expected = answer(offline, PROMPT, **params).token_ids
    steps = {}
    for k in (0, 2, 6):
        extra = {
            "speculative": {"num_speculative_tokens": k},
            "include_speculation_stats": True,
            "return_token_ids": True,
        }
        found = client.completions.create(model="tiny", prompt=PROMPT, extra_body=extra, **params)
        assert tuple(found.choices[0].token_ids) == expected
        steps[k] = found.speculation["num_steps"]
        assert (found.speculation["num_draft_tokens"] == 0) == (k == 0)
    assert steps[0] == 48
    assert steps[6] < steps[0]


def test_several_prompts_and_completions(client, offline):
    prompts = [PROMPT, [97, 98, 99], "er in"]
    params = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "n": 2}
    found = client.completions.create(model="tiny", prompt=prompts[0::2], **params)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    for index, prompt in enumerate(prompts[0::2]):
        (output,) = offline.generate([prompt], SamplingParams(**params))
        texts = [choice.text for choice in found.choices[2 * index : 2 * index + 2]]
        assert texts == [one.text for one in output.outputs]
    ids = client.completions.create(model="tiny", prompt=prompts[1], **params)
    (output,) = offline.generate([{"prompt_token_ids": prompts[1]}], SamplingParams(**params))
    assert [choice.text for choice in ids.choices] == [one.text for one in output.outputs]


def test_every_stop_string_ends_stream_and_whole_alike(client, offline):
    """Also one that begins in one token, or one window, and ends in another."""
    params = {"temperature": 0.0, "max_tokens": 40}
    text = answer(offline, PROMPT, **params).text
    stops = {text[start : start + length] for length in (1, 2, 3, 5) for start in range(0, 20, 3)}
    for stop in sorted(stop for stop in stops if stop and "\ufffd" not in stop):
        expected = answer(offline, PROMPT, stop=stop, **params)
        request = {"model": "tiny", "prompt": PROMPT, "stop": [stop], **params}
        found = client.completions.create(**request)
        assert found.choices[0].text == expected.text == text[: text.index(stop)]
        assert found.choices[0].finish_reason == "stop"
        assert whole_text(client.completions.create(stream=True, **request)) == expected.text


def test_logprobs_of_completions(client, offline):
    params = {"temperature": 0.0, "max_tokens": 6, "logprobs": 3}
    expected = answer(offline, PROMPT, **params)
    found = client.completions.create(model="tiny", prompt=PROMPT, echo=True, **params)
    logprobs = found.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    chosen = [
        entry[token_id].logprob
        for entry, token_id in zip(expected.logprobs, expected.token_ids, strict=True)
    ]
    assert logprobs.token_logprobs[-6:] == pytest.approx(chosen, abs=0)
    assert len(logprobs.tokens) == len(logprobs.text_offset) == found.usage.total_tokens


def test_chat(client):
    params = {"messages": USER, "temperature": 0.0, "max_completion_tokens": 30}
    found = client.chat.completions.create(model="tiny", **params)
    assert isinstance(found, ChatCompletion)
    assert found.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(
            model="tiny", stream=True, stream_options={"include_usage": True}, **params
        )
    )
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == found.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == found.usage.completion_tokens == 30
    assert chunks[-2].choices[0].finish_reason == found.choices[0].finish_reason == "length"


def test_chat_through_the_client_s_own_accumulator(client):
    params = {"messages": USER, "temperature": 0.5, "seed": 5, "max_completion_tokens": 20}
    params |= {"logprobs": True, "top_logprobs": 2, "n": 2}
    params["extra_body"] = {"guided_regex": "[a-f]{6,12}"}
    found = client.chat.completions.create(model="tiny", **params)
    with client.chat.completions.stream(model="tiny", **params) as stream:
        for _ in stream:
            pass
        whole = stream.get_final_completion()
    for streamed, choice in zip(whole.choices, found.choices, strict=True):
        assert streamed.message.content == choice.message.content
        assert [one.token for one in streamed.logprobs.content] == [
            one.token for one in choice.logprobs.content
        ]
        assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_response_is_the_answer_of_a_chat(client, temperature):
    sampling = {"temperature": temperature, "extra_body": {"seed": 11}}
    chat = client.chat.completions.create(
        model="tiny", messages=USER, max_completion_tokens=30, **sampling
    )
    params = {"model": "tiny", "input": USER, "max_output_tokens": 30, **sampling}
    found = client.responses.create(**params)
    assert found.output_text == chat.choices[0].message.content
    assert found.usage.output_tokens == chat.usage.completion_tokens
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    events = list(client.responses.create(stream=True, **params))
    told = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    whole = events[-1].response
    assert told == whole.output_text == found.output_text
    assert whole.status == found.status
    assert whole.usage == found.usage


def test_a_response_through_the_client_s_own_accumulator(client):
    params = {"model": "tiny", "input": USER, "temperature": 0.0}
    params["extra_body"] = {"structured_outputs": {"regex": "[a-f]{6,12}"}}
    with client.responses.stream(**params) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == (
            client.responses.create(**params).output_text
        )


def test_an_agent_goes_on_from_the_items_of_a_response(client):
    tools = [{"type": "function", "name": "pick", "parameters": SCHEMA, "strict": False}]
    forced = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(model="tiny", input=USER, temperature=0.0, **forced)
    (call,) = (item for item in first.output if item.type == "function_call")
    assert call.name == "pick"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "the inner"}
    items = [*USER, *(item.to_dict() for item in first.output), result]
    calls = [{"id": call.call_id, "type": "function",
              "function": {"name": "pick", "arguments": call.arguments}}]  # fmt: skip
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "the inner", "tool_call_id": call.call_id},
    ]
    params = {"model": "tiny", "temperature": 0.0}
    second = client.responses.create(input=items, max_output_tokens=20, **params)
    chat = client.chat.completions.create(messages=messages, max_completion_tokens=20, **params)
    assert second.output_text == chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="send the earlier items as input"):
        client.responses.create(input="x", previous_response_id=first.id, **params)


def test_a_response_in_a_schema(client):
    form = {"type": "json_schema", "name": "form", "schema": SCHEMA, "strict": True}
    params = {"model": "tiny", "input": USER, "text": {"format": form}, "temperature": 0.0}
    found = client.responses.create(**params)
    assert isinstance(json.loads(found.output_text), dict)
    extra = {"speculative": {"num_speculative_tokens": 0}, "include_speculation_stats": True}
    plain = client.responses.create(**params, extra_body=extra)
    assert plain.output_text == found.output_text
    assert plain.speculation["num_draft_tokens"] == 0


@pytest.mark.parametrize("k", [0, 6])
def test_structured_answers(client, k):
    extra = {"speculative": {"num_speculative_tokens": k}}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    found = client.chat.completions.create(
        model="tiny", messages=USER, seed=1, response_format=form, extra_body=extra
    )
    assert set(json.loads(found.choices[0].message.content)) == {"name", "old"}
    found = client.completions.create(
        model="tiny", prompt=PROMPT, seed=1, extra_body=extra | {"guided_regex": "(ab|cd){3}"}
    )
    assert re.fullmatch("(ab|cd){3}", found.choices[0].text)


def test_a_call_or_an_answer_of_the_format(client):
    """A random model writes no call, only its mark, which this helps along or hinders."""
    mark = byte_tokenizer().token_to_id("<")
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    request = {"model": "tiny", "messages": USER, "seed": 1, "tools": [ADD], "max_tokens": 150}
    for bias in (-9.0, 9.0):
        request |= {"response_format": form, "logit_bias": {str(mark): bias}}
        drafted, plain = (
            client.chat.completions.create(
                **request, extra_body={"speculative": {"num_speculative_tokens": k}}
            )
            for k in (6, 0)
        )
        (choice,) = drafted.choices
        assert choice == plain.choices[0]
        if bias < 0:
            assert set(json.loads(choice.message.content)) == {"name", "old"}
            assert choice.finish_reason == "stop"
        else:
            assert choice.message.content.startswith("<tool_call>")
        stream = client.chat.completions.create(**request, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == choice.message.content


def test_forced_tool_calls(client):
    for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
        request = {"model": "tiny", "messages": USER, "tools": [ADD], "tool_choice": choice}
        found = client.chat.completions.create(seed=2, max_tokens=400, **request)
        calls = found.choices[0].message.tool_calls
        assert {call.function.name for call in calls} == {"pick"}
        if found.choices[0].finish_reason != "length":
            assert set(json.loads(calls[-1].function.arguments)) == {"name", "old"}
        with client.chat.completions.stream(seed=2, max_tokens=400, **request) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert [one.function.arguments for one in streamed] == [
            one.function.arguments for one in calls
        ]


@pytest.mark.parametrize(
    ("request_body", "error"),
    [
        ({"model": "other", "prompt": "x"}, openai.NotFoundError),
        ({"model": "tiny", "prompt": "x", "temperature": -1.0}, openai.BadRequestError),
        ({"model": "tiny", "prompt": ""}, openai.BadRequestError),
        ({"model": "tiny", "prompt": [99999]}, openai.BadRequestError),
        ({"model": "tiny", "prompt": "x " * 2000}, openai.BadRequestError),
        ({"model": "tiny", "prompt": "x", "suffix": "y"}, openai.BadRequestError),
        ({"model": "tiny", "prompt": "x", "max_tokens": 0}, openai.BadRequestError),
        (
            {"model": "tiny", "prompt": "x", "extra_body": {"guided_regex": "(((("}},
            openai.BadRequestError,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_as_the_client_knows_them(client, request_body, error, stream):
    with pytest.raises(error) as caught:
        client.completions.create(stream=stream, **request_body)
    assert caught.value.body["message"]
    assert caught.value.body["type"].endswith("_error")


def test_models_and_tokens(client, server, offline):
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 1024
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    text = "the inner 🙂"
    ids = client._client.post(f"{server.url}/tokenize", json={"prompt": text}).json()
    assert ids["tokens"] == offline.get_tokenizer().encode(text)
    back = client._client.post(f"{server.url}/detokenize", json={"tokens": ids["tokens"]}).json()
    assert back == {"prompt": text}


def test_a_client_that_leaves_frees_its_place(client, server):
    aborted = server.engine.stats().num_finished.get("abort", 0)
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="tiny", prompt=PROMPT, max_tokens=1000, extra_body={"ignore_eos": True}
        )
    deadline = time.monotonic() + 600
    while server.engine.stats().num_finished.get("abort", 0) < aborted + 2:
        assert time.monotonic() < deadline, "a request that nobody waits for still runs"
        time.sleep(0.02)


def test_64_clients(client, server, offline):
    """All at once, half of them streaming: no error, and every answer is the offline one."""
    params = [{"temperature": 0.7 * (i % 2), "seed": i, "max_tokens": 8 + i % 5} for i in range(64)]
    prompts = [f"the inner {i % 7} the other" for i in range(64)]

    async def one(made: openai.AsyncOpenAI, i: int) -> str:
        request = {"model": "tiny", "prompt": prompts[i], **params[i]}
        if i % 4 < 2:
            return (await made.completions.create(**request)).choices[0].text
        stream = await made.completions.create(stream=True, **request)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0
        ) as made:
            return await asyncio.gather(*(one(made, i) for i in range(64)))

    found = asyncio.run(all_at_once())
    outputs = offline.generate(prompts, [SamplingParams(**one) for one in params])
    assert found == [output.outputs[0].text for output in outputs]
