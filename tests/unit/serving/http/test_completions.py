from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial

import pytest
from tokenizers.processors import TemplateProcessing

from helpers.events import events, merged_completions
from helpers.fake_engine import FakeEngine
from sametoken.errors import (
    DrainingError,
    EngineDeadError,
    EngineRestartingError,
    OverloadedError,
    RequestError,
)
from sametoken.serving.http import chat, completions

TEXT = "héllo wörld 🙂 done"
USER = [{"role": "user", "content": "hi"}]


def client_of(serve, engine="hello", **server) -> Callable:
    """Posts completions of one prompt, or of those that it is given."""
    client = serve(engine, **server)
    return lambda **body: client.post("/v1/completions", json={"prompt": "x"} | body)


def both(serve, engine=None, **body) -> tuple[dict, list[dict]]:
    """The answer to a request without and with a stream."""
    engine = engine or FakeEngine(lambda prompt, index: f"{prompt}/{index}: {TEXT}")
    post = partial(client_of(serve, engine), **{"prompt": "ab", "max_tokens": 200} | body)
    whole, stream = post(), post(stream=True)
    assert whole.status_code == 200, whole.text
    assert stream.headers["content-type"].startswith("text/event-stream")
    return whole.json(), events(stream)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 3},
        {"prompt": ["ab", "the"], "n": 2, "echo": True},
        {"prompt": [97, 98], "echo": True, "logprobs": 2},
        {"prompt": [[97], [98, 99]], "logprobs": 0, "return_token_ids": True},
        {"stop": ["wör", "x"], "logprobs": 1},
        {"stop": "🙂", "include_stop_str_in_output": True},
        {"max_tokens": 5},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
    ],
)
def test_a_stream_adds_up_to_the_whole(serve, body):
    whole, chunks = both(serve, **body)
    found = merged_completions(chunks)
    assert sorted(found) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        streamed = found[choice["index"]]
        assert streamed["text"] == choice["text"]
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert streamed["logprobs"] == (choice["logprobs"] or {})
        assert streamed["token_ids"] == choice.get("token_ids", [])


def test_choices_come_in_the_order_of_prompts(serve):
    whole, _ = both(serve, prompt=["p", "q"], n=2)
    starts = [choice["text"][:4] for choice in whole["choices"]]
    assert starts == ["p/0:", "p/1:", "q/0:", "q/1:"]
    assert whole["usage"]["prompt_tokens"] == 2


def test_an_answer_has_the_id_that_the_client_gave(serve):
    engine = FakeEngine()
    for _ in range(2):
        whole, chunks = both(serve, engine, request_id="mine-1")
        assert {one["id"] for one in (whole, *chunks)} == {"cmpl-mine-1"}
    refused = client_of(serve)(request_id="a" * 257)
    assert refused.json()["error"]["param"] == "request_id"


def test_echo_shows_the_prompt_and_its_logprobs(serve):
    whole, _ = both(serve, FakeEngine("xy"), prompt="abc", echo=True, logprobs=1)
    (choice,) = whole["choices"]
    assert choice["text"] == "abcxy"
    assert choice["logprobs"]["tokens"][:5] == ["a", "b", "c", "x", "y"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"][:5] == [0, 1, 2, 3, 4]


def test_offsets_are_those_of_characters_of_many_tokens(serve):
    body = {"prompt": "é🙂a", "echo": True, "logprobs": 0}
    whole, chunks = both(serve, FakeEngine("ü🙂b"), **body)
    (choice,) = whole["choices"]
    assert choice["text"] == "é🙂aü🙂b"
    starts = [0, 0, 1, 1, 1, 1, 2, 3, 3, 4, 4, 4, 4, 5, 6]
    assert choice["logprobs"]["text_offset"] == starts
    assert merged_completions(chunks)[0]["logprobs"]["text_offset"] == starts


def test_offsets_leave_out_a_token_that_the_tokenizer_adds(serve):
    engine = FakeEngine("xy")
    name = engine.tokenizer.hf.eos_token
    engine.tokenizer.backend.post_processor = TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, engine.tokenizer.eos_token_id)]
    )
    whole, _ = both(serve, engine, prompt="abc", echo=True, logprobs=0)
    (choice,) = whole["choices"]
    assert choice["text"] == "abcxy"
    assert choice["logprobs"]["tokens"][:3] == [name, "a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 4, 5]


def test_only_the_prompt_when_no_token_is_asked_for(serve):
    whole, _ = both(serve, prompt="abc", echo=True, logprobs=1, max_tokens=0)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert whole["usage"]["completion_tokens"] == 0


def test_a_token_that_is_not_sent_is_no_reason_to_end(serve):
    echo = {"prompt": "abc", "echo": True, "max_tokens": 0}
    for said, body in (("", {}), ("hello", {"stop": "h"}), ("", {"n": 2, "logprobs": 0})):
        whole, chunks = both(serve, FakeEngine(said, window=1), **echo, **body)
        found = {(one["finish_reason"], one["stop_reason"]) for one in whole["choices"]}
        assert found == {("length", None)}
        assert {one["finish_reason"] for one in merged_completions(chunks).values()} == {"length"}


def test_usage_and_statistics_when_asked_for(serve):
    options = {"stream_options": {"include_usage": True}, "include_speculation_stats": True}
    post = partial(client_of(serve), prompt="ab", stream=True)
    *chunks, last = events(post(**options))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 2 + 6
    assert last["speculation"]["acceptance_per_position"] == [1.0, 1.0]
    assert last["speculation"]["offered_per_position"] == [2, 2]
    assert all("usage" not in chunk and "speculation" not in chunk for chunk in events(post()))


def test_usage_throughout_a_stream(serve):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client_of(serve)(prompt=["ab", "c"], stream=True, stream_options=options)
    *events_of_choices, last = events(stream)
    assert last["usage"]["total_tokens"] == 3 + 2 * 6
    for index, num_prompt_tokens in enumerate((2, 1)):
        own = [one["usage"] for one in events_of_choices if one["choices"][0]["index"] == index]
        assert {usage["prompt_tokens"] for usage in own} == {num_prompt_tokens}
        counts = [usage["completion_tokens"] for usage in own]
        assert counts == sorted(set(counts))
        assert counts[-1] == 6


def test_a_prompt_beyond_the_context_has_openai_s_code(serve):
    """By which clients know that a shorter conversation may fit."""
    client = serve()
    body = {"role": "user", "content": "x" * 600}
    for path, prompt in (
        ("completions", {"prompt": [1] * 600}),
        ("completions", {"prompt": "x" * 100_000}),
        ("chat/completions", {"messages": [body]}),
        ("responses", {"input": "x" * 600}),
    ):
        answer = client.post(f"/v1/{path}", json=prompt)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == next(iter(prompt))


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({"prompt": "abc", "truncate_prompt_tokens": 2}, [65, 66]),
        ({"prompt": "abc", "truncate_prompt_tokens": 9}, [64, 65, 66]),
        ({"prompt": [1] * 600 + [2, 3], "truncate_prompt_tokens": 3}, [1, 2, 3]),
        ({"prompt": [2] * 104 + [1] * 496, "truncate_prompt_tokens": -1}, [1] * 496),
        ({"prompt": [1] * 600 + [2], "truncate_prompt_tokens": -1, "max_tokens": 510}, [1, 2]),
        # The engine makes one token.
        ({"prompt": "x" * 600, "truncate_prompt_tokens": -1, "max_tokens": None}, [87] * 511),
    ],
)
def test_the_last_tokens_of_a_prompt_are_kept(serve, body, kept):
    """As with vLLM."""
    engine = FakeEngine()
    answer = client_of(serve, engine)(return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["prompt_token_ids"] == kept
    assert list(engine.seen[0][0].token_ids) == kept


def test_echo_is_of_what_is_kept(serve):
    body = {"prompt": "héllo", "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 0}
    (choice,) = client_of(serve)(**body).json()["choices"]
    assert choice["text"] == "llo"


def test_all_that_fits_is_nothing_beside_an_answer_that_fills_the_context(serve):
    answer = client_of(serve)(prompt="abc", truncate_prompt_tokens=-1, max_tokens=512)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("prompt", ["", [], ["a", ""], [[1], []]])
def test_an_empty_prompt_is_named(serve, prompt):
    answer = client_of(serve)(prompt=prompt)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_the_drafts_of_every_step_when_asked_for(serve):
    post = partial(client_of(serve), prompt="ab", include_speculation_stats="detailed")
    speculation = post().json()["speculation"]
    assert len(speculation["per_step_drafted"]) == speculation["num_steps"]
    assert sum(speculation["per_step_drafted"]) == speculation["num_draft_tokens"]
    assert sum(speculation["per_step_accepted"]) == speculation["num_accepted_tokens"] > 0
    *_, last = events(post(stream=True))
    assert last["speculation"] == speculation
    for several in ({"n": 2}, {"prompt": ["a", "b"]}):
        answer = post(**several)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "include_speculation_stats"


def test_all_events_of_a_stream_have_one_time(serve, monkeypatch):
    clock = itertools.count(1000)
    post = client_of(serve)
    monkeypatch.setattr("sametoken.serving.http.completions.time.time", lambda: next(clock))
    chunks = events(post(stream=True))
    assert len(chunks) > 1
    assert len({chunk["created"] for chunk in chunks}) == 1


def test_token_ids_and_prompt_logprobs(serve):
    whole, chunks = both(
        serve, FakeEngine("x" * 9), prompt="ab", return_token_ids=True, prompt_logprobs=1
    )
    (choice,) = whole["choices"]
    assert len(choice["prompt_token_ids"]) == 2
    assert [entry is None for entry in choice["prompt_logprobs"]] == [True, False]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert "prompt_token_ids" not in chunks[-1]["choices"][0]


def test_speculation_of_one_request(serve):
    engine = FakeEngine()
    post = client_of(serve, engine)
    for k in (0, 4):
        assert post(speculative={"num_speculative_tokens": k}).status_code == 200
    assert [params.num_speculative_tokens for _, params in engine.seen] == [0, 4]
    error = post(speculative={"num_speculative_tokens": 5}).json()["error"]
    assert error["param"] == "speculative"


def test_requests_are_made_off_the_loop(serve, monkeypatch):
    engine = FakeEngine("aa")
    process_all = engine._inputs.process_all
    threads = []

    def watched(*args):
        threads.append(threading.current_thread().name)
        return process_all(*args)

    monkeypatch.setattr(engine._inputs, "process_all", watched)
    body = {"prompt": ["x", "y"], "guided_regex": "a+", "bad_words": ["b"]}
    assert client_of(serve, engine)(**body).status_code == 200
    assert len(threads) == 1
    assert threads[0].startswith("asyncio_")
    assert engine.seen[1][1].structured_outputs.regex == "a+"


@pytest.mark.parametrize(
    ("body", "made"),
    [
        ({"prompt": "abc", "prompt_logprobs": 1}, (completions, "prompt_logprobs")),
        ({"prompt": "abc", "echo": True, "logprobs": 1}, (completions, "completion_logprobs")),
        ({"prompt": [97], "echo": True}, (completions, "make_detokenizer")),
        ({"messages": USER, "prompt_logprobs": 1}, (chat, "prompt_logprobs")),
    ],
)
def test_what_a_stream_tells_of_a_prompt_is_made_off_the_loop(serve, monkeypatch, body, made):
    threads = []
    make = getattr(*made)

    def watched(*args, **options):
        threads.append(threading.current_thread().name)
        return make(*args, **options)

    monkeypatch.setattr(*made, watched)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = serve(FakeEngine("xyz", window=1)).post(path, json=body | {"stream": True})
    assert answer.text.endswith("[DONE]\n\n")
    assert threads[0].startswith("asyncio_")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"best_of": 3}, "best_of"),
        ({"n": 200}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"prompt": 5}, "prompt"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_honoured_is_refused_by_name(serve, body, param, stream):
    answer = client_of(serve)(stream=stream, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("enable_thinking", "chat_template_kwargs"),
        ("guided_decoding_backend", "xgrammar"),
        ("guided_whitespace_pattern", "grammar"),
        ("logprob_token_ids", "use logprobs"),
        ("lora_path", "in model"),
        ("max_new_tokens", "use max_tokens"),
        ("num_speculative_tokens", "speculative"),
        ("prompt_embeds", "token ids"),
        ("repetition_detection", "repetition_penalty"),
        ("vllm_xargs", "leave it out"),
    ],
)
def test_a_known_name_of_another_engine_is_refused_with_the_right_one(serve, field, remedy):
    answer = client_of(serve)(**{field: 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
    assert remedy in answer.json()["error"]["message"]


def test_a_model_may_be_named_as_an_adapter_too(serve):
    """SGLang's benchmark of vLLM's servers sends both."""
    assert client_of(serve)(model="toy", lora_path="toy").status_code == 200
    assert client_of(serve)(model="toy", lora_path="other").status_code == 400


def test_the_grammar_backend_that_is_used_may_be_named(serve):
    assert client_of(serve)(guided_decoding_backend="xgrammar").status_code == 200


BROKEN = "((("


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [2**30]}, "prompt"),
        ({"stop_token_ids": [2**30]}, "stop_token_ids"),
        ({"allowed_token_ids": [2**30]}, "allowed_token_ids"),
        ({"logit_bias": {str(2**30): 1.0}}, "logit_bias"),
        ({"guided_regex": BROKEN}, "guided_regex"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"structured_outputs": {"regex": BROKEN}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"response_format": {"type": "regex", "regex": BROKEN}}, "response_format"),
        ({"response_format": {"type": "text"}, "guided_json": "{"}, "guided_json"),
    ],
)
def test_errors_of_the_engine_name_the_field_that_was_sent(serve, body, param):
    answer = client_of(serve)(**body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_have_a_limit(serve, name):
    post = client_of(serve, max_logprobs=2)
    assert post(**{name: 2}).status_code == 200
    refused = post(**{name: 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert "above the 2 of this server" in refused.json()["error"]["message"]


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
def test_candidates_of_prompts_have_a_limit(serve, asked):
    """They are in each completion, so that one request could take all memory."""
    engine = FakeEngine()
    body = {"prompt": ["x" * 500], "n": 400, "max_tokens": 1} | asked
    refused = client_of(serve, engine, max_completions=400)(**body)
    assert refused.status_code == 400
    assert f"would have {500 * 400 * 21} candidates" in refused.json()["error"]["message"]
    assert not engine.seen


def test_options_of_a_stream_need_one(serve):
    answer = client_of(serve)(stream_options={"include_usage": True})
    assert answer.json()["error"]["param"] == "stream_options"


def test_what_changes_no_token_is_accepted(serve):
    body = {"user": "me", "store": True, "metadata": {"a": "b"}, "suffix": None}
    assert client_of(serve)(**body).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("the prompt is bad", "mend it"), 400, None),
        (OverloadedError("too many wait", "try later", 2.5), 429, "overloaded"),
        (DrainingError("it stops", "go elsewhere"), 503, "draining"),
        (EngineRestartingError("it died", "wait"), 503, "engine_restarting"),
        (EngineDeadError("it died", "restart it"), 503, "engine_dead"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine(serve, error, status, code, stream, caplog):
    answer = client_of(serve, FakeEngine(refuse=error))(stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "secret" not in answer.text
    if status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 3


def test_a_failed_request_fails_alone_and_says_so(serve):
    post = client_of(serve, FakeEngine(failed=True))
    whole = post()
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
    (event,) = events(post(stream=True))
    assert event["error"]["code"] == "NumericalError"


def test_models_that_are_not_here(serve):
    post = client_of(serve, served_model_name=("small", "tiny"))
    answers = [post(model=name) for name in ("tiny", "toy", None)]
    assert [answer.status_code for answer in answers] == [200, 404, 200]
    assert [answers[0].json()["model"], answers[2].json()["model"]] == ["tiny", "small"]
    assert answers[1].json()["error"]["code"] == "model_not_found"
