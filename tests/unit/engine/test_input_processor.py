"""From prompts as users write them to requests of token ids."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from helpers.chat_model import byte_tokenizer
from sametoken.engine import user_inputs
from sametoken.engine.input_processor import InputProcessor
from sametoken.engine.user_inputs import PromptTokens, params_of, parts_of, prompts_of
from sametoken.errors import RequestError
from sametoken.text.grammar.after_reasoning import GrammarAfterReasoning
from sametoken.text.grammar.grammar import XGrammar
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.sampling_params import SamplingParams, derive_seed
from sametoken.types.structured_outputs import Reasoning, StructuredOutputs

VOCAB = 340
MAX_LEN = 32


def make(tokenizer, seed=7, num_drafts=4):
    return InputProcessor(
        tokenizer,
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        eos_token_ids=(0, 5),
        num_speculative_tokens=num_drafts,
        seed=seed,
    )


def process(inputs, token_ids=(10, 11), request_id="r", **params):
    prompt = PromptTokens(None, tuple(token_ids))
    return inputs.process(request_id, prompt, SamplingParams(**params))


def test_the_forms_of_a_prompt_agree(tokenizer):
    inputs = make(tokenizer)
    ids = tokenizer.encode("the cat")
    assert inputs.tokenize("the cat") == PromptTokens("the cat", ids)
    assert inputs.tokenize({"prompt": "the cat"}) == PromptTokens("the cat", ids)
    assert inputs.tokenize({"prompt_token_ids": list(ids)}) == PromptTokens(None, ids)
    assert inputs.tokenize(list(ids)) == PromptTokens(None, ids)
    assert inputs.tokenize(PromptTokens("the", ids)) == PromptTokens("the", ids)


@pytest.mark.parametrize("form", [list, tuple, iter, np.array])
def test_the_longest_prompt_of_ids_is_read_whole_and_no_longer_one(tokenizer, form):
    inputs, most = make(tokenizer), range(1, MAX_LEN)
    given = {"prompt_token_ids": form(list(most))}
    assert inputs.tokenize(given) == PromptTokens(None, tuple(most))
    longer = {"prompt_token_ids": form([*most, 1])}
    with pytest.raises(RequestError, match="32 tokens > 31 maximum"):
        process(inputs, inputs.tokenize(longer).token_ids)


@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_ids_in_arrays_become_integers(tokenizer, array):
    inputs = make(tokenizer)
    assert inputs.tokenize({"prompt_token_ids": array([3, 4])}) == PromptTokens(None, (3, 4))
    assert prompts_of(array([[3, 4], [5, 6]])) == [[3, 4], [5, 6]]


def test_a_list_of_numpy_s_integers_is_one_prompt(tokenizer):
    (prompt,) = prompts_of([np.int64(3), np.int64(4)])
    ids = make(tokenizer).tokenize(prompt).token_ids
    assert (ids, {type(one) for one in ids}) == ((3, 4), {int})


def test_chat_goes_through_the_template(tokenizer):
    prompt = make(tokenizer).tokenize_chat([{"role": "user", "content": "hi"}])
    assert prompt.text == "<|user|>hi<|end|>"
    assert prompt.token_ids == tokenizer.encode("<|user|>hi<|end|>")


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        (17, "a prompt of type int"),
        (["a", "b"], "a prompt of type list"),
        ({"prompt": 3}, "a prompt text of type int"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids of type str"),
        ({"prompt_token_ids": 12}, "prompt_token_ids of type int"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "keys"),
        ({"input_ids": [1], "attention_mask": [1]}, 'Give its "input_ids" alone'),
        ({"promt": "a"}, "'promt'"),
        ({}, "keys"),
    ],
)
def test_other_forms_are_refused(tokenizer, prompt, cause):
    with pytest.raises(RequestError, match=cause) as caught:
        make(tokenizer).tokenize(prompt)
    assert caught.value.remedy


@pytest.mark.parametrize("messages", [[], ["hi"], [3], [{"role": "user", "content": "hi"}, 3]])
def test_conversations_without_messages_are_refused(tokenizer, messages):
    with pytest.raises(RequestError, match="needs messages"):
        make(tokenizer).tokenize_chat(messages)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ({"content": "hi"}, "no role"),
        ({"role": "user", "content": 5}, "a content of type int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of type 'image_url'"),
        ({"role": "user", "content": ["hi"]}, "a part of type 'str'"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "a part of type 'text'"),
    ],
)
def test_messages_that_a_template_would_misread_are_refused(tokenizer, message, cause):
    with pytest.raises(RequestError, match=cause):
        make(tokenizer).tokenize_chat([message])


def test_content_in_parts_is_their_text_and_none_is_empty(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content, text in ((parts, "a\nb"), (None, "")):
        prompt = make(tokenizer).tokenize_chat([{"role": "user", "content": content}])
        assert prompt.text == f"<|user|>{text}<|end|>"


def test_calls_of_earlier_messages_have_objects_as_arguments(tokenizer, caplog, monkeypatch):
    """Also those of an answer that was cut off, or the conversation would end with it."""
    # A server's filter, where its modules are loaded.
    monkeypatch.setattr(user_inputs._logger, "filters", [])
    template = (
        "{% for one in messages[0].tool_calls %}{{ one.function.arguments | tojson }};{% endfor %}"
    )
    given = ('{"a": 1}', {"b": 2}, "", "[1]", '{"a": "', "[" * 2000)
    calls = [{"function": {"name": "add", "arguments": one}} for one in given]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    prompt = make(tokenizer).tokenize_chat([message], chat_template=template)
    assert prompt.text == '{"a": 1};{"b": 2};{};{};{};{};'
    assert [record.args for record in caplog.records] == [("'add'", n) for n in (3, 7, 2000)]
    calls = [{"function": {"name": "add", "arguments": '{"a": 1e400}'}}]
    with pytest.raises(RequestError, match=r"call of 'add' .* a number is not finite") as caught:
        make(tokenizer).tokenize_chat([message | {"tool_calls": calls}], chat_template=template)
    assert caught.value.param == "messages"
    template = "{% if messages[0].tool_calls is defined %}calls{% else %}none{% endif %}"
    for calls in (None, []):
        prompt = make(tokenizer).tokenize_chat(
            [message | {"tool_calls": calls}], chat_template=template
        )
        assert prompt.text == "none"


def test_variables_of_the_template_may_come_in_chat_template_kwargs(tokenizer):
    hi = [{"role": "user", "content": "hi"}]
    options = {"add_generation_prompt": False}
    prompt = make(tokenizer).tokenize_chat(hi, chat_template_kwargs=options)
    assert prompt.text == "<|user|>hi"
    with pytest.raises(RequestError, match="chat_template_kwargs='x'"):
        make(tokenizer).tokenize_chat(hi, chat_template_kwargs="x")
    for name in ("messages", "self", "conversation", "tokenize", 1):
        with pytest.raises(RequestError, match="a chat template has no variable"):
            make(tokenizer).tokenize_chat(hi, chat_template_kwargs={name: hi})


@pytest.mark.parametrize(
    ("token_ids", "cause"),
    [
        ((), "the prompt is empty"),
        ((1, VOCAB), "holds 340, outside the vocabulary of 340"),
        ((1, -1), "holds -1, outside"),
        ((1, True), "holds True"),
        ((1, 2.0), "holds 2.0"),
        ((1,) * MAX_LEN, "has 32 tokens > 31 maximum: .* context length is 32 tokens"),
    ],
)
def test_impossible_token_ids_are_refused(tokenizer, token_ids, cause):
    with pytest.raises(RequestError, match=cause):
        process(make(tokenizer), token_ids)


def test_the_longest_prompt_leaves_room_for_one_token(tokenizer):
    (request,) = process(make(tokenizer), (1,) * (MAX_LEN - 1)).completions
    assert request.max_total_tokens == MAX_LEN


@pytest.mark.parametrize(("max_tokens", "limit"), [(4, 6), (30, 32), (31, 32), (None, 32)])
def test_output_ends_at_max_tokens_or_max_model_len(tokenizer, max_tokens, limit):
    (request,) = process(make(tokenizer), max_tokens=max_tokens).completions
    assert request.max_total_tokens == limit


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [VOCAB]},
        {"allowed_token_ids": [1, VOCAB]},
        {"logit_bias": {VOCAB: 1.0}},
        {"stop_token_ids": ["a"]},
    ],
)
def test_parameters_outside_the_vocabulary_are_refused_by_name(tokenizer, params):
    with pytest.raises(RequestError, match=next(iter(params))):
        process(make(tokenizer), **params)


def test_parameters_of_another_type_are_refused(tokenizer):
    with pytest.raises(RequestError, match="of type dict"):
        make(tokenizer).process("r", PromptTokens(None, (1,)), {"temperature": 0})


def test_parameters_that_are_no_list_name_both_forms():
    with pytest.raises(RequestError, match="Give SamplingParams, or a list of them"):
        params_of({"temperature": 0}, 1)


def test_one_part_may_wake_up_by_its_name():
    assert parts_of("weights") == ("weights",)
    assert parts_of(["weights", "kv_cache"]) == ("weights", "kv_cache")
    assert parts_of(None) is None


@pytest.mark.parametrize("tags", [5, {"weights": True}, [5, "weights"], [["weights"]]])
def test_what_names_no_part_is_refused(tags):
    with pytest.raises(RequestError, match='Give "weights", "kv_cache" or a list of them'):
        parts_of(tags)


def test_what_needs_text_is_refused_without_a_tokenizer():
    inputs = make(None)
    for call in (
        lambda: inputs.tokenize("the cat"),
        lambda: inputs.tokenize_chat([{"role": "user", "content": "x"}]),
        lambda: process(inputs, stop="x"),
        lambda: process(inputs, bad_words=["x"]),
    ):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            call()
    assert process(inputs).completions[0].prompt_token_ids == (10, 11)


def test_stop_ids_are_eos_and_the_request_s_own(tokenizer):
    inputs = make(tokenizer)
    stops = [
        process(inputs, **params).completions[0].stop_token_ids
        for params in (
            {},
            {"stop_token_ids": [9, 5]},
            {"stop_token_ids": [9, 5], "ignore_eos": True},
        )
    ]
    assert stops == [(0, 5), (0, 5, 9), (9, 5)]


def test_bad_words_are_known_with_and_without_a_space(tokenizer):
    (request,) = process(make(tokenizer), bad_words=["cat", " cat"]).completions
    spellings = [tokenizer.encode("cat"), tokenizer.encode(" cat")]
    assert list(request.bad_words_token_ids) == spellings


def test_bad_words_of_white_space_are_no_spaces(tokenizer):
    (request,) = process(make(tokenizer), bad_words=["\n", "\tcat", "  "]).completions
    spellings = map(tokenizer.encode, ["\n", " \n", "\tcat", " \tcat", "  "])
    assert list(request.bad_words_token_ids) == list(spellings)


def test_a_given_seed_is_kept_and_completions_derive_theirs(tokenizer):
    processed = process(make(tokenizer), n=3, seed=42)
    assert [c.request_id for c in processed.completions] == ["r.0", "r.1", "r.2"]
    assert [c.params.seed for c in processed.completions] == [
        42,
        derive_seed(42, 1),
        derive_seed(42, 2),
    ]
    assert all(c.params.n == 1 for c in processed.completions)


def test_the_first_completion_alone_scores_the_prompt(tokenizer):
    processed = process(make(tokenizer), n=3, prompt_logprobs=2)
    assert processed.params.prompt_logprobs == 2
    assert [c.params.prompt_logprobs for c in processed.completions] == [2, None, None]


def test_drawn_seeds_depend_on_the_engine_s_seed_and_the_order_alone(tokenizer):
    def draw(seed):
        inputs = make(tokenizer, seed)
        seeds = []
        for n in (1, 2, 1):
            process(inputs, seed=1)
            seeds += [c.params.seed for c in process(inputs, n=n).completions]
        return seeds

    first = draw(7)
    assert first == draw(7)
    assert first != draw(8)
    assert len(set(first)) == len(first)


def test_the_user_s_parameters_are_left_as_they_were(tokenizer):
    params = SamplingParams(n=2)
    before = dataclasses.asdict(params)
    processed = make(tokenizer).process("r", PromptTokens(None, (1,)), params)
    assert dataclasses.asdict(params) == before
    assert processed.params is params


def test_all_completions_share_what_structured_outputs_compile_to(tokenizer):
    inputs = make(tokenizer)
    form = StructuredOutputs(regex="[a-z]+")
    processed = process(inputs, n=2, structured_outputs=form)
    first, second = (completion.grammar for completion in processed.completions)
    assert first is second
    assert first.new_matcher() is not second.new_matcher()
    assert process(inputs).completions[0].grammar is None


def test_what_is_compiled_already_is_known(tokenizer):
    inputs, form = make(tokenizer), StructuredOutputs(regex="[a-z]+")
    params = SamplingParams(structured_outputs=form)
    bounded = StructuredOutputs(reasoning=Reasoning((9,), budget=4))
    for free in (SamplingParams(), SamplingParams(structured_outputs=bounded)):
        assert inputs.grammars.knows(free)
    assert not inputs.grammars.knows(params)
    process(inputs, structured_outputs=form)
    assert inputs.grammars.knows(params)


def test_structured_outputs_that_cannot_be_served_are_refused_before_any_work(tokenizer):
    with pytest.raises(RequestError, match="regex is not valid"):
        process(make(tokenizer), structured_outputs=StructuredOutputs(regex="(a"))
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        process(make(None), structured_outputs=StructuredOutputs(regex="a"))
    for reasoning in (Reasoning((VOCAB,)), Reasoning((1,), -1), Reasoning((1,), None, (VOCAB,))):
        with pytest.raises(RequestError, match=r"reasoning holds -?[0-9]+, outside the vocabulary"):
            process(
                make(tokenizer),
                structured_outputs=StructuredOutputs(regex="a", reasoning=reasoning),
            )


MARKS = ("<think>", "</think>", "<tool_call>")
BEGIN, END, CALL = map(byte_tokenizer(MARKS).token_to_id, MARKS)


@pytest.fixture(scope="module", params=["{}", "seed:{}"])
def reasoner(request):
    marks = [mark.replace(name := mark.strip("</>"), request.param.format(name)) for mark in MARKS]
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(marks)))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ((9,), {"begins": (BEGIN,), "budget": 4}),
        ((9, BEGIN), {"budget": 4}),
        ((BEGIN, 9, END, BEGIN, 9), {"budget": 3}),
        ((BEGIN, 9, 9, 9, 9, 9, 9), {"budget": 0}),
        ((BEGIN, 9, END, 9), {"begins": (BEGIN,), "budget": 4}),
        # What stands in an earlier message, which 5 ends, is no reasoning of this one.
        ((BEGIN, 9, 5, 9), {"begins": (BEGIN,), "budget": 4}),
    ],
)
def test_a_budget_bounds_the_reasoning_by_the_marks_of_the_tokenizer(reasoner, prompt, expected):
    (completion,) = process(make(reasoner), prompt, thinking_token_budget=4).completions
    assert completion.grammar == GrammarAfterReasoning(
        None, Reasoning((END,), also_ends=(CALL,), **expected)
    )


def test_a_budget_of_any_number_is_none_and_needs_no_marks(tokenizer):
    assert SamplingParams(thinking_token_budget=-1) == SamplingParams()
    (completion,) = process(make(tokenizer), thinking_token_budget=-1).completions
    assert completion.grammar is None


def test_a_budget_bounds_the_reasoning_before_a_structure(reasoner):
    for budget in (0, 7):
        structured = StructuredOutputs(regex="a", reasoning=Reasoning((9, 8)))
        (completion,) = process(
            make(reasoner), structured_outputs=structured, thinking_token_budget=budget
        ).completions
        assert completion.grammar.reasoning == Reasoning((9, 8), budget=budget)
    at_once = {"structured_outputs": StructuredOutputs(regex="a")}
    (completion,) = process(make(reasoner), thinking_token_budget=4, **at_once).completions
    assert isinstance(completion.grammar, XGrammar)


def test_a_budget_that_cannot_be_kept_is_refused(tokenizer, reasoner):
    with pytest.raises(RequestError, match="none of </think>"):
        process(make(tokenizer), thinking_token_budget=4)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        process(make(None), thinking_token_budget=4)
    with pytest.raises(RequestError, match=f"allowed_token_ids leaves out .* Allow .*{END}"):
        process(make(reasoner), thinking_token_budget=4, allowed_token_ids=[9])
    process(make(reasoner), thinking_token_budget=4, allowed_token_ids=[9, END])
    header = StructuredOutputs(regex="a", reasoning=Reasoning((9,), header_end=8))
    with pytest.raises(RequestError, match="no budget"):
        process(make(reasoner), thinking_token_budget=4, structured_outputs=header)


@pytest.mark.parametrize("own", [None, 0, 1, 4])
def test_a_request_chooses_its_number_of_drafts(tokenizer, own):
    (completion,) = process(make(tokenizer), num_speculative_tokens=own).completions
    assert completion.num_speculative_tokens == own


def test_more_drafts_than_the_engine_s_are_refused(tokenizer):
    with pytest.raises(RequestError, match="num_speculative_tokens=5 is above the engine's 4"):
        process(make(tokenizer), num_speculative_tokens=5)


def test_drafts_without_a_drafter_are_refused_with_its_option(tokenizer):
    with pytest.raises(RequestError, match="Give the engine a speculative_config"):
        process(make(tokenizer, num_drafts=0), num_speculative_tokens=1)
