"""The engine for programs, over an engine that emits a script."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import pickle
import signal
import weakref

import pytest

import sametoken
from helpers.checkpoints import write_llama
from sametoken import LoRARequest
from sametoken.engine import offline_requests
from sametoken.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from sametoken.llm import LLM
from sametoken.text.grammar import grammar
from sametoken.text.grammar.compiled import CompiledGrammars
from sametoken.types.request import RequestUpdate
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import StructuredOutputs

EOS = 0
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture
def ids(tokenizer):
    return lambda text: list(tokenizer.encode(text))


@pytest.mark.parametrize("lag", [0, 2])
def test_outputs_come_in_the_order_of_the_prompts(scripted, ids, lag):
    cat, dog = ids("the cat"), ids("the dog sat on")
    llm, engine = scripted([dog[:2], dog[2:], [EOS]], [cat, [EOS]], lag=lag)
    outputs = llm.generate(["a", {"prompt_token_ids": ids("b")}], GREEDY)
    assert [o.outputs[0].text for o in outputs] == ["the dog sat on", "the cat"]
    assert [o.prompt for o in outputs] == ["a", None]
    assert not engine.has_unfinished
    # The EOS is kept too.
    first, second = (len(request.prompt_token_ids) for request in engine.requests)
    assert engine.num_kept == {"0": first + len(dog) + 1, "1": second + len(cat) + 1}


def test_one_prompt_may_stand_alone(scripted, ids):
    llm, _ = scripted([ids("the cat"), [EOS]])
    (output,) = llm.generate("a", GREEDY, use_tqdm=True)
    assert output.outputs[0].text == "the cat"
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("num_prompts", "times"), [(offline_requests._MANY - 1, 0), (offline_requests._MANY, 1)]
)
def test_objects_are_left_out_of_searches_for_garbage_where_many_requests_run(
    scripted, monkeypatch, num_prompts, times
):
    """To look at what is left out already takes longer than a step of one request."""
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    llm, _ = scripted(*[[[EOS]]] * num_prompts)
    assert len(llm.generate(["a"] * num_prompts, GREEDY)) == num_prompts
    assert len(frozen) == times


def test_chat_takes_one_conversation_or_several(scripted, tokenizer):
    llm, engine = scripted([[EOS]], [[EOS]], [[EOS]])
    user = [{"role": "user", "content": "hi"}]
    assert len(llm.chat(user, GREEDY)) == 1
    assert len(llm.chat([user, user], GREEDY, add_generation_prompt=False)) == 2
    prompts = [
        tokenizer.decode(r.prompt_token_ids, skip_special_tokens=False) for r in engine.requests
    ]
    assert prompts == ["<|user|>hi<|end|>", "<|user|>hi", "<|user|>hi"]


def test_arguments_of_vllm_without_a_meaning_here_are_refused_before_anything_runs(scripted):
    llm, engine = scripted([[EOS]], [[EOS]])
    hi = [{"role": "user", "content": "hi"}]
    for call in (
        lambda **given: llm.generate("a", GREEDY, **given),
        lambda **given: llm.generate_stream("a", GREEDY, **given),
        lambda **given: llm.chat(hi, GREEDY, **given),
    ):
        with pytest.raises(RequestError, match=r"^prompt_adapter_request='x' is not offered: .*"):
            call(prompt_adapter_request="x")
        with pytest.raises(RequestError, match=r"no adapter 'x'. Start the engine with lora_mod"):
            call(lora_request="x")
    assert engine.requests == []
    llm.generate("a", GREEDY, lora_request=None, priority=None, tokenization_kwargs=None)
    # What has the name of a sampling parameter may still reach a template.
    llm.chat(hi, GREEDY, chat_template_kwargs={"seed": 1}, chat_template_content_format="auto")
    assert len(engine.requests) == 2


def test_each_request_has_the_adapter_that_it_names(scripted, resolved):
    config = dataclasses.replace(resolved.config, lora_modules={"sql": "./a", "chat": "./b"})
    llm, engine = scripted(*[[[EOS]]] * 7, config=config)
    hi = [{"role": "user", "content": "hi"}]
    llm.generate(["a", "b", "c"], GREEDY, lora_request=["chat", None, LoRARequest("sql", 1, "./a")])
    llm.generate("a", GREEDY, lora_request="sql")
    llm.chat([hi, hi], GREEDY, lora_request=["sql", "chat"])
    list(llm.generate_stream("a", GREEDY, lora_request="chat"))
    names = ["chat", None, "sql", "sql", "sql", "chat", "chat"]
    assert [one.lora_name for one in engine.requests] == names
    with pytest.raises(RequestError, match="2 adapters were given for 1 prompts"):
        llm.generate("a", GREEDY, lora_request=["sql", "chat"])
    for bad in (5, {}, [["sql"]]):
        with pytest.raises(RequestError, match=r"lora_request=.* is not possible"):
            llm.generate("a", GREEDY, lora_request=bad)
    assert len(engine.requests) == 7


def test_lists_of_ids_and_rendered_chats_are_prompts(scripted):
    llm, engine = scripted([[EOS]], [[EOS]], [[EOS]], [[EOS]])
    llm.generate([5, 6], GREEDY)
    llm.generate([[5, 6], [7]], GREEDY)
    rendered = llm.render_chat([{"role": "user", "content": "hi"}])
    llm.generate(rendered, GREEDY)
    expected = [(5, 6), (5, 6), (7,), rendered.token_ids]
    assert [one.prompt_token_ids for one in engine.requests] == expected


def test_names_of_the_package_are_listed_before_they_are_loaded():
    assert set(sametoken.__all__) <= set(dir(sametoken))


def test_a_cause_with_a_period_is_followed_by_its_remedy_alone():
    assert str(RequestError("it ended.", "begin again")) == "it ended. Begin again"


def test_an_id_that_is_no_text_is_refused(scripted):
    llm, _ = scripted()
    with pytest.raises(RequestError, match="request_id=5 is not possible"):
        llm.abort(5)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_is_not_copied(scripted, copied):
    llm, _ = scripted()
    with pytest.raises(RequestError, match="Load the model in the process that uses it"):
        copied(llm)


def test_nothing_runs_if_one_input_is_invalid(scripted):
    llm, engine = scripted([[EOS]], [[EOS]])
    for prompts, params in (
        (["a", ""], GREEDY),
        (["a", "b"], [GREEDY]),
        (["a", {"text": "b"}], GREEDY),
        ([1, "b"], GREEDY),
    ):
        with pytest.raises(RequestError):
            llm.generate(prompts, params)
    assert engine.requests == []
    assert engine.num_steps == 0


def test_a_grammar_without_memory_is_refused_before_anything_runs(scripted, monkeypatch):
    """One that is known to be valid, too: it may not be compiled any more."""
    llm, engine = scripted([[EOS]])
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="[a-z]{2,9}"))
    llm.generate("a", params)
    engine.requests.clear()
    store = CompiledGrammars(max_live_bytes=0)
    for name, value in vars(store).items():
        monkeypatch.setattr(grammar._COMPILED, name, value)
    for generate in (llm.generate, llm.generate_stream):
        with pytest.raises(OverloadedError, match="in use"):
            generate("a", params)
    assert engine.requests == []


def test_a_request_that_the_engine_refuses_takes_the_others_back(scripted):
    llm, engine = scripted([[EOS]], [[EOS]])
    engine.refuse[1] = RequestError("too long", "shorten it")
    with pytest.raises(RequestError, match="too long"):
        llm.generate(["a", "b"], GREEDY)
    assert engine.released == ["0"]
    assert engine.num_steps == 0


def test_a_request_that_fails_while_it_runs_leaves_the_others_alone(scripted, ids):
    failed = RequestUpdate("", (), 0, 0, True, 0, failed=True)
    llm, _ = scripted([ids("the"), failed], [ids("the"), ids(" cat"), [EOS]])
    bad, good = llm.generate(["a", "b"], GREEDY)
    assert bad.outputs[0].finish_reason == "error"
    assert good.outputs[0].text == "the cat"


def test_an_interrupt_loses_no_finished_output(scripted, ids):
    llm, engine = scripted(
        [ids("the"), ids(" cat"), [EOS]], [ids("dog"), [EOS]], [ids("mat"), [EOS]], [[EOS]]
    )
    finished = {}

    def interrupt(index, output):
        finished[index] = output.outputs[0].text
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY, on_finished=interrupt)
    # Both of the same step.
    assert finished == {1: "dog", 2: "mat"}
    assert "0" in engine.released
    assert llm.generate("d", GREEDY)[0].finished


def test_a_dead_engine_is_reported_once_and_as_it_died(scripted):
    llm, engine = scripted([EngineDeadError("a step failed")])
    with pytest.raises(EngineDeadError, match="a step failed"):
        llm.generate("a", GREEDY)
    assert engine.released == ["0"]


def test_streamed_outputs_grow_and_end_with_the_whole(scripted, ids):
    tokens = ids("the cat sat on the mat")
    llm, engine = scripted([tokens[:1], tokens[1:4], tokens[4:], [EOS]])
    outputs = list(llm.generate_stream("a", GREEDY))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 4, len(tokens), len(tokens) + 1]
    assert [o.finished for o in outputs] == [False, False, False, True]
    assert outputs[-1].outputs[0].text == "the cat sat on the mat"
    assert not engine.has_unfinished


def test_closing_a_stream_aborts_its_request(scripted, ids):
    llm, engine = scripted([ids("the"), ids("cat"), ids("sat")], [[EOS]], lag=1)
    stream = llm.generate_stream("a", GREEDY)
    next(stream)
    stream.close()
    assert engine.released == ["0"]
    llm.generate("b", GREEDY)
    assert not engine.has_unfinished
    unstarted = llm.generate_stream("c", GREEDY)
    unstarted.close()
    assert len(engine.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_interrupt_in_mid_step_ends_at_once(scripted, ids, stream):
    llm, engine = scripted([ids("the"), KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        list(llm.generate_stream("a", GREEDY)) if stream else llm.generate("a", GREEDY)
    assert engine.released == ["0"]
    assert engine.num_steps == 2


def test_an_update_that_cannot_be_taken_in_ends_the_engine(scripted, ids, monkeypatch):
    llm, _ = scripted([ids("the"), [EOS]], [[EOS]])
    monkeypatch.setattr(llm._requests._outputs, "process", lambda updates, now: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate("a", GREEDY)
    with pytest.raises(EngineDeadError):
        llm.generate("b", GREEDY)
    assert llm._requests._latest == {}


def test_an_output_that_cannot_be_begun_leaves_nothing(scripted, ids, monkeypatch):
    llm, engine = scripted([[EOS]], [ids("the"), [EOS]])
    with monkeypatch.context() as patch:
        patch.setattr(llm._requests._outputs, "add", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate("a", GREEDY)
    assert engine.released == ["0"]
    assert llm.generate("b", GREEDY)[0].outputs[0].text == "the"


def test_an_invalid_stream_is_refused_at_the_call(scripted):
    llm, _ = scripted()
    with pytest.raises(RequestError, match="empty"):
        llm.generate_stream("", GREEDY)


def test_a_stream_survives_a_batch_in_its_middle(scripted, ids):
    llm, _ = scripted([ids("the"), ids(" cat"), [EOS]], [ids("dog"), [EOS]])
    stream = llm.generate_stream("a", GREEDY)
    assert next(stream).outputs[0].text == "the"
    (other,) = llm.generate("b", GREEDY)
    assert other.outputs[0].text == "dog"
    assert list(stream)[-1].outputs[0].text == "the cat"


def test_abort_ends_a_stream_where_it_stands(scripted, ids):
    llm, _ = scripted([ids("the"), ids(" cat"), [EOS]])
    stream = llm.generate_stream("a", GREEDY)
    first = next(stream)
    llm.abort(first.request_id)
    llm.abort("unknown")
    (last,) = list(stream)
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("the", "abort")


def test_speculation_counters_sum_over_finished_requests(scripted, ids):
    tokens = ids("the cat sat on")
    llm, _ = scripted([tokens[:1], tokens[1:4], [EOS]], [tokens[:2], [EOS]])
    outputs = llm.generate(["a", "b"], GREEDY)
    total = outputs[0].metrics.speculation + outputs[1].metrics.speculation
    assert llm.speculation_metrics == total
    assert total.num_steps == 5
    assert total.num_accepted_tokens == 3


def test_a_request_s_times_have_its_first_step(scripted, ids):
    llm, _ = scripted([ids("the"), [EOS]])
    (output,) = llm.generate(["a"], GREEDY)
    times = output.metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time


def test_eos_of_model_and_tokenizer_both_end_a_text(scripted):
    llm, engine = scripted([[EOS]])
    llm.generate("a", GREEDY)
    assert engine.requests[0].stop_token_ids == (EOS,)


def test_without_a_tokenizer_token_ids_work(scripted):
    llm, _ = scripted([[7, 8], [EOS]], with_tokenizer=False)
    (output,) = llm.generate({"prompt_token_ids": [5]}, GREEDY)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ((7, 8, EOS), "")
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.get_tokenizer()


def test_sampling_defaults_come_from_the_checkpoint(scripted, tmp_path):
    llm, engine = scripted([[EOS]], model_path=tmp_path)
    assert llm.get_default_sampling_params() == SamplingParams()
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    expected = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_tokens=9)
    assert llm.get_default_sampling_params() == expected
    llm.generate("a")
    assert engine.requests[0].params.top_k == 20
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="generation_config"):
        llm.get_default_sampling_params()


def test_get_tokenizer_is_the_hugging_face_one(scripted, tokenizer):
    llm, _ = scripted()
    assert llm.get_tokenizer() is tokenizer.hf


def test_options_of_vllm_are_taken_as_on_the_command_line(caplog):
    with pytest.raises(ConfigError, match=r"^download_dir='x' is not offered: .* HF_HUB_CACHE"):
        LLM("nowhere", download_dir="x")
    assert caplog.records == []
    with pytest.raises(ConfigError, match="dtype"):
        LLM("nowhere", trust_remote_code=True, dtype="float8")
    assert [(one.levelname, one.message) for one in caplog.records] == [
        (
            "WARNING",
            "without effect here: trust_remote_code=True (code of a checkpoint is never run)",
        )
    ]


def test_a_revision_is_part_of_the_model_s_name():
    with pytest.raises(ConfigError, match=r"^revision 'main' is for a hub id without one"):
        LLM("nowhere", revision="main")


def test_options_are_checked_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="Did you mean 'dtype'"):
        LLM("nowhere", dtyp="float32")


@pytest.mark.parametrize(
    ("file", "content", "cause"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", '{"eos_token": "stop"}', "ends texts with token [0-9]{2,3}, and"),
    ],
)
def test_a_tokenizer_is_refused_before_weights_are_read(
    tokenizer, tmp_path, monkeypatch, file, content, cause
):
    model, own = write_llama(tmp_path / "model"), tmp_path / "tokenizer"
    tokenizer.hf.save_pretrained(own)
    (own / file).write_text(content)
    monkeypatch.setattr("sametoken.engine.build.load", None)
    with pytest.raises(CheckpointError, match=cause):
        LLM(str(model), tokenizer=str(own))


def test_a_block_lets_the_engine_go(scripted, ids):
    llm, engine = scripted([ids("the cat"), [EOS]], [[5], [6], [EOS]])
    let_go = weakref.ref(engine)
    del engine
    with llm as same:
        assert same is llm
        (output,) = llm.generate(["a"], GREEDY)
        begun = llm.generate_stream("b", GREEDY)
        next(begun)
    assert output.outputs[0].text == "the cat"
    begun.close()
    assert let_go() is None
    for late in (lambda: llm.generate(["a"], GREEDY), lambda: llm.resolved, llm.sleep):
        with pytest.raises(EngineDeadError, match="was let go"):
            late()
