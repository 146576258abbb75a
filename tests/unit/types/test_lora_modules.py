"""LoRA adapters by name: the forms in which users give them, and in which requests choose them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sametoken import LoRARequest
from sametoken.errors import ConfigError, RequestError
from sametoken.types.lora_modules import (
    AdapterNames,
    LoRAModule,
    choices_of,
    module_of,
    parse_modules,
    require_adapter,
)

SQL, CHAT = LoRAModule("sql", "./a=b"), LoRAModule("chat", "org/chat")
BOTH = (SQL, CHAT)


@pytest.mark.parametrize(
    "given",
    [
        {"sql": "./a=b", "chat": "org/chat"},
        ["sql=./a=b", "chat=org/chat"],
        BOTH,
        ('{"name": "sql", "path": "./a=b"}', {"name": "chat", "path": "org/chat"}),
        [' {"name": "sql", "path": "./a=b", "base_model_name": "m"}', CHAT],
    ],
)
def test_adapters_are_given_in_vllm_s_forms_and_by_name(given):
    assert parse_modules(given) == BOTH


def test_a_path_may_be_an_object(tmp_path):
    assert parse_modules({"sql": tmp_path}) == (LoRAModule("sql", str(tmp_path)),)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ("sql=./a", "is of the wrong type"),
        (5, "is of the wrong type"),
        (["sql"], "is no adapter"),
        (["=./a"], "is no adapter"),
        (["sql="], "is no adapter"),
        ([5], "is no adapter"),
        ({"a=b": "./a"}, "is no adapter"),
        ({"a\ud800": "./a"}, "is no adapter"),
        ({"a\nb": "./a"}, "is no adapter"),
        ({"sql": None}, "is no adapter"),
        (["{"], "is not JSON"),
        (['{"name": "sql"}'], "is no adapter"),
        (["sql=a", "sql=b"], "has 'sql' twice"),
    ],
)
def test_what_is_no_adapter_is_refused(given, cause):
    with pytest.raises(ConfigError, match=cause):
        parse_modules(given)


def test_requests_choose_by_name(tmp_path):
    names = AdapterNames(BOTH)
    assert [names.name(one) for one in (None, "sql", "chat")] == [None, "sql", "chat"]
    for path in ("", "./a=b"):
        assert names.name(LoRARequest("sql", 7, path)) == "sql"
    assert names.name(SimpleNamespace(lora_name="chat")) == "chat"
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    loaded = AdapterNames(parse_modules({"sql": tmp_path / "a"}))
    for path in (tmp_path / "link", f"{tmp_path}/link/../a"):
        assert loaded.name(LoRARequest("sql", 1, path)) == "sql"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("sq", "there is no adapter 'sq'. Did you mean 'sql'? Use 'sql' or 'chat'"),
        (5, "lora_request=5 is not possible. Give the name of an adapter, or a LoRARequest"),
        (LoRARequest("other", 1), "there is no adapter 'other'"),
        (LoRARequest(["sql"], 1), "is not possible"),
        (LoRARequest("sql", 1, "./b"), "'sql' was loaded from './a=b', not from './b'"),
        (LoRARequest("sql", 1, "\0"), "not from"),
        (LoRARequest("sql", 1, 5), "not from 5. Give that path, or the name alone"),
    ],
)
def test_another_choice_is_refused(chosen, message):
    with pytest.raises(RequestError) as refused:
        require_adapter(BOTH, chosen)
    assert message in str(refused.value)
    assert refused.value.param == "lora_request"


def test_without_adapters_the_remedy_is_to_load_one():
    with pytest.raises(RequestError, match="Start the engine with lora_modules"):
        require_adapter((), "sql")


def test_a_choice_is_for_all_prompts_or_for_each():
    assert choices_of(None, 2) == [None, None]
    assert choices_of("chat", 2) == ["chat", "chat"]
    assert choices_of(5, 1) == [5]
    each = [LoRARequest("chat", 1), None, "sql"]
    assert choices_of(each, 3) == each
    with pytest.raises(RequestError, match="2 adapters were given for 1 prompts"):
        choices_of(("sql", None), 1)
    with pytest.raises(RequestError, match="lora_request=5 is not possible"):
        require_adapter(BOTH, 5)


def test_adapters_come_and_go():
    names = AdapterNames(BOTH)
    again = LoRAModule("sql", "./other")
    for _ in range(2):
        names.add(again, brought=True)
        assert (names.modules, names.brought) == ((CHAT, again), ("sql",))
    names.remove("chat")
    names.remove("nowhere")
    assert names.modules == (again,)
    names.restart()
    assert names.modules == BOTH


def test_an_adapter_has_a_path_or_tensors():
    assert module_of("a", None, sent=True) == LoRAModule("a", "")
    for path, sent in (("./a", True), (None, False)):
        with pytest.raises(RequestError, match=r"(both a path and|neither a path nor) tensors"):
            module_of("a", path, sent=sent)
    sent = AdapterNames([LoRAModule("a", "")])
    with pytest.raises(RequestError, match="loaded from a trainer's memory, not"):
        sent.name(LoRARequest("a", 1, "./a"))
