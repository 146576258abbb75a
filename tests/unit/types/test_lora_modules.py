"""LoRA adapters by name: the forms in which users give them, and in which requests choose them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sametoken import LoRARequest
from sametoken.errors import ConfigError, RequestError
from sametoken.types.lora_modules import (
    AdapterNames,
    LoRAModule,
    adapter_number,
    choices_of,
    parse_modules,
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
    assert [adapter_number(BOTH, name) for name in (None, "sql", "chat")] == [0, 1, 2]
    for path in ("", "./a=b"):
        assert adapter_number(BOTH, LoRARequest("sql", 7, path)) == 1
    assert adapter_number(BOTH, SimpleNamespace(lora_name="chat")) == 2
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    loaded = parse_modules({"sql": tmp_path / "a"})
    for path in (tmp_path / "link", f"{tmp_path}/link/../a"):
        assert adapter_number(loaded, LoRARequest("sql", 1, path)) == 1


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("sq", "there is no adapter 'sq'. did you mean 'sql'? use 'sql' or 'chat'"),
        (5, "lora_request=5 is not possible. give the name of an adapter, or a LoRARequest"),
        (LoRARequest("other", 1), "there is no adapter 'other'"),
        (LoRARequest(["sql"], 1), "is not possible"),
        (LoRARequest("sql", 1, "./b"), "'sql' was loaded from './a=b', not from './b'"),
        (LoRARequest("sql", 1, "\0"), "not from"),
        (LoRARequest("sql", 1, 5), "not from 5. give that path, or the name alone"),
    ],
)
def test_another_choice_is_refused(chosen, message):
    with pytest.raises(RequestError) as refused:
        adapter_number(BOTH, chosen)
    assert message in str(refused.value)
    assert refused.value.param == "lora_request"


def test_without_adapters_the_remedy_is_to_load_one():
    with pytest.raises(RequestError, match="start the engine with lora_modules"):
        adapter_number((), "sql")


def test_a_choice_is_for_all_prompts_or_for_each():
    assert choices_of(None, 2) == [None, None]
    assert choices_of("chat", 2) == ["chat", "chat"]
    assert choices_of(5, 1) == [5]
    each = [LoRARequest("chat", 1), None, "sql"]
    assert choices_of(each, 3) == each
    with pytest.raises(RequestError, match="2 adapters were given for 1 prompts"):
        choices_of(("sql", None), 1)
    with pytest.raises(RequestError, match="lora_request=5 is not possible"):
        adapter_number(BOTH, 5)


def test_no_number_is_given_twice():
    names = AdapterNames(BOTH)
    for _ in range(2):
        again = LoRAModule("sql", "./other")
        names.add(again, names.next_number(), brought=True)
        assert names.modules == (CHAT, again)
    assert (names.number("sql"), names.number("chat"), names.brought) == (4, 2, ("sql",))
    names.remove("chat")
    assert (names.number_of("chat"), names.number_of("sql")) == (0, 4)
    names.restart()
    assert (names.modules, names.number("sql"), names.next_number()) == (BOTH, 1, 5)
