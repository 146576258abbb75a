"""Tokenizers of checkpoint directories and of GGUF files."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise

import gguf
import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors
from transformers import PreTrainedTokenizerFast, tokenization_utils_tokenizers

from helpers.chat_model import byte_tokenizer
from helpers.examples import FIXED
from helpers.gguf_files import written
from helpers.hub import cache_snapshot
from sametoken.config import EngineConfig
from sametoken.errors import (
    CheckpointError,
    ConfigError,
    DrafterMismatchError,
    RequestError,
    UnsupportedError,
)
from sametoken.models.load.gguf_file import read_gguf
from sametoken.models.names import resolve_model
from sametoken.text import template_inputs
from sametoken.text.gguf_tokenizer import build_gguf_tokenizer, pre_tokenizer
from sametoken.text.tokenizer import (
    Tokenizer,
    bounded_steps,
    load_tokenizer,
    load_tokenizer_here,
    load_tokenizer_of,
    require_same_tokens,
)

TEXTS = [
    "the cat sat on the mat",
    "x =  12345\n\n    67",
    "schöne Grüße 日本語 🎉 \x00\x7f",
    "<|user|>hello<|end|>",
    "",
]
HI = [{"role": "user", "content": "hi"}]


def ggml(**values) -> dict:
    """Values under the names that GGUF's tokenizers have."""
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def gguf_metadata(backend: Backend, **changes) -> dict:
    spec = json.loads(backend.to_str())
    vocabulary = backend.get_vocab(with_added_tokens=True)
    special = {token["content"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    own = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [special.get(token, 1) for token in tokens],
        "merges": [" ".join(pair) for pair in spec["model"]["merges"]],
    }
    return ggml(**own | changes)


def split(rule, text: str) -> list[str]:
    return [piece for piece, _ in rule.pre_tokenize_str(text)]


@pytest.fixture
def gguf_path(backend, tmp_path):
    metadata = gguf_metadata(backend)
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}!")
    return written(writer, path)


@pytest.mark.parametrize("text", TEXTS)
def test_a_gguf_file_gives_the_tokens_of_the_tokenizer_it_was_made_from(gguf_path, tokenizer, text):
    loaded = load_tokenizer(gguf_path)
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text), skip_special_tokens=False) == text
    assert loaded.special_ids == tokenizer.special_ids


@pytest.mark.parametrize("name", ["sha256-0123", "tiny.GGUF", "tiny.v1.0"])
def test_a_gguf_file_may_have_any_ending(gguf_path, tokenizer, name):
    loaded = load_tokenizer(gguf_path.rename(gguf_path.with_name(name)))
    assert loaded.encode("the cat") == tokenizer.encode("the cat")


def test_a_gguf_file_brings_its_end_token_and_chat_template(gguf_path):
    loaded = load_tokenizer(gguf_path.parent)
    assert loaded.eos_token_id == 0
    assert loaded.apply_chat_template(HI) == "hi!"


@pytest.mark.parametrize(
    ("name", "is_composed"), [("qwen2", True), ("qwen35", True), ("gpt-2", False)]
)
def test_characters_of_two_parts_are_one_to_qwen(backend, name, is_composed):
    built = build_gguf_tokenizer(gguf_metadata(backend, pre=name))
    assert (built.encode("e\u0301").ids == built.encode("\u00e9").ids) == is_composed


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("qwen2", "aB b 1234", ["aB", "Ġb", "Ġ", "1", "2", "3", "4"]),
        ("deepseek-r1-qwen", "aB b 1234", ["aB", "Ġb", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "aB b 1234", ["aB", "Ġb", "Ġ", "123", "4"]),
        ("falcon-h1", "aB b 1234", ["aB", "Ġb", "Ġ", "123", "4"]),
        ("tekken", "aB b 1234", ["a", "B", "Ġb", "Ġ", "1", "2", "3", "4"]),
        ("qwen35", "aB b 1234", ["aB", "Ġb", "Ġ", "1", "2", "3", "4"]),
        ("dbrx", "aB b 1234", ["aB", "Ġb", "Ġ", "123", "4"]),
        ("refact", "aB b 1234", ["aB", "Ġb", "Ġ", "1", "2", "3", "4"]),
        ("gpt-4o", "aB b 1234", ["a", "B", "Ġb", "Ġ", "123", "4"]),
        ("seed-coder", "aB b 1234", ["aB", "Ġb", "Ġ", "1", "2", "3", "4"]),
        ("deepseek-v3", "aB b 1234", ["aB", "Ġb", "Ġ", "123", "4"]),
        ("deepseek-llm", "aB b 1234", ["aB", "Ġb", "Ġ", "1", "2", "3", "4"]),
        ("kimi-k2", "aB b 1234", ["a", "B", "Ġb", "Ġ", "123", "4"]),
        ("gpt-2", "=  12", ["=", "Ġ", "Ġ12"]),
        ("smollm", "=  12", ["=", "ĠĠ", "1", "2"]),
        ("gpt-4o", "it's /\n/", ["it's", "Ġ/Ċ/"]),
        ("llama-bpe", "it's /\n/", ["it", "'s", "Ġ/Ċ", "/"]),
        ("seed-coder", "it's /\n/", ["it", "'s", "Ġ/", "Ċ", "/"]),
        ("qwen2", "e\u0301x", ["e", "Ìģx"]),
        ("qwen35", "e\u0301x", ["eÌģx"]),
        ("deepseek-v3", "a.b 日本", ["a", ".b", "Ġ", "æĹ¥æľ¬"]),
        ("deepseek-llm", "a.b  \n日本ж", ["a", ".", "b", "ĠĠ", "Ċ", "æĹ¥æľ¬", "Ð¶"]),
        ("deepseek-llm", "\u1f00\u212a \u10d0", ["á¼ĢâĦª", "Ġ", "áĥĲ"]),
        ("kimi-k2", "it's /\n/", ["it's", "Ġ/Ċ", "/"]),
        ("kimi-k2", "getUserName", ["get", "User", "Name"]),
        ("kimi-k2", "日本English日", ["æĹ¥æľ¬", "English", "æĹ¥"]),
    ],
)
def test_texts_are_split_as_the_vocabulary_was_trained(backend, name, text, pieces):
    built = build_gguf_tokenizer(gguf_metadata(backend, pre=name))
    assert split(built.pre_tokenizer, text) == pieces


@pytest.mark.parametrize(
    ("tokens", "stored", "pieces"),
    [
        (("[AVAILABLE_TOOLS]",), "llama-bpe", ["a", "B", "Ġ", "1", "2", "3"]),
        (("[AVAILABLE_TOOLS]",), "qwen2", ["aB", "Ġ", "1", "2", "3"]),
        (("[AVAILABLE_TOOLS]",), None, None),
        (("<tools>",), "llama-bpe", ["aB", "Ġ", "123"]),
    ],
)
def test_words_of_mistral_s_vocabulary_are_its_own_whatever_its_file_says(
    tmp_path, tokens, stored, pieces
):
    """tokenizer.json of Mistral-Small-3.1-24B-Instruct-2503 is wrong so (transformers#42389)."""
    backend = byte_tokenizer(tokens)
    backend.pre_tokenizer = stored and pre_tokenizer(stored)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        rule = load_tokenizer(path).backend.pre_tokenizer
        assert (rule and split(rule, "aB 123")) == pieces


def test_transformers_does_not_warn_of_mistral_s_words(tmp_path, monkeypatch):
    """It does for every large vocabulary of the family, right ones included."""
    vocabulary = {f"{index}": index for index in range(100_001)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizer("tekken")
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "mistral3"}')
    said = []
    monkeypatch.setattr(tokenization_utils_tokenizers.logger, "warning", said.append)
    load_tokenizer(tmp_path)
    assert said == []


def test_add_bos_token_puts_it_in_front(backend):
    built = build_gguf_tokenizer(gguf_metadata(backend, add_bos_token=True, bos_token_id=1))
    assert built.encode("the").ids[0] == 1
    assert built.encode("the", add_special_tokens=False).ids[0] != 1


@pytest.mark.parametrize(
    ("pre", "told", "begins"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("tekken", {}, True),
        ("qwen2", {}, False),
    ],
)
def test_texts_of_some_begin_with_a_token_unless_a_file_says_otherwise(backend, pre, told, begins):
    built = build_gguf_tokenizer(gguf_metadata(backend, pre=pre, bos_token_id=1, **told))
    assert (built.encode("the").ids[0] == 1) == begins


@pytest.mark.parametrize("change", [{"model": "bert"}, {"pre": "x"}])
def test_other_gguf_tokenizers_are_refused_by_name(backend, change):
    with pytest.raises(UnsupportedError, match=r"'(bert|x)'"):
        build_gguf_tokenizer(gguf_metadata(backend, **change))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_gguf_file_without_vocabulary_is_refused(backend, kind):
    with pytest.raises(CheckpointError, match="no vocabulary"):
        build_gguf_tokenizer(gguf_metadata(backend, model=kind, tokens=[]))


#: Of SentencePiece: what is unknown, a beginning, ends, a mark, bytes, and pieces with scores.
SPECIAL = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|end|>": 3, "  ": 4}
BYTES = [f"<0x{value:02X}>" for value in range(256)]
LETTERS = ["▁", "a", "b", "c"]


def pieces_metadata(pieces=(), **changes) -> dict:
    tokens = [*SPECIAL, *BYTES, *LETTERS, *pieces]
    plain = len(LETTERS) + len(pieces)
    own = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [*SPECIAL.values(), *[6] * 256, *[1] * plain],
        "scores": [0.0] * (len(tokens) - plain) + [-float(i) for i in range(plain)],
        "add_bos_token": False,
    }
    return ggml(**own | changes)


def in_pieces(text, scores):
    """SentencePiece's rule, as it is written: the best pair of neighbours, while there is one."""
    found = list(text)
    while True:
        pairs = [left + right for left, right in pairwise(found)]
        known = [(scores[one], -place) for place, one in enumerate(pairs) if one in scores]
        if not known:
            return found
        place = -max(known)[1]
        found[place : place + 2] = [pairs[place]]


@settings(FIXED, max_examples=100)
@given(data=st.data())
def test_pieces_of_a_score_are_made_as_sentencepiece_makes_them(data):
    letters = st.text("▁abc", min_size=2, max_size=4)
    pieces = data.draw(st.lists(letters, unique=True, max_size=12))
    metadata = pieces_metadata(pieces)
    tokens, scores = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
    built = build_gguf_tokenizer(metadata)
    text = data.draw(st.text("abc", max_size=10))
    wanted = in_pieces("▁" + text, dict(zip(tokens, scores, strict=True))) if text else []
    assert built.encode(text).tokens == wanted
    assert built.decode(built.encode(text).ids) == text


@pytest.mark.parametrize(
    ("text", "changes", "tokens"),
    [
        ("a b", {}, ["▁", "a", "▁", "b"]),
        ("a b", {"add_space_prefix": False}, ["a", "▁", "b"]),
        ("a", {"add_bos_token": True, "bos_token_id": 2}, ["</s>", "▁", "a"]),
        ("a<|end|>b", {}, ["▁", "a", "<|end|>", "▁", "b"]),
        ("a  b", {"add_space_prefix": False}, ["a", "  ", "b"]),
        ("é\n", {"add_space_prefix": False}, ["<0xC3>", "<0xA9>", "<0x0A>"]),
    ],
)
def test_texts_of_a_sentencepiece_vocabulary(text, changes, tokens):
    built = build_gguf_tokenizer(pieces_metadata(**changes))
    encoded = built.encode(text)
    assert encoded.tokens == tokens
    if "</s>" not in tokens and tokens.count("▁") < 2:
        assert built.decode(encoded.ids, skip_special_tokens=False) == text


def test_one_space_before_a_text_is_the_vocabulary_s_own():
    built = build_gguf_tokenizer(pieces_metadata())
    assert built.decode([built.token_to_id(piece) for piece in "▁▁a"]) == " a"


def test_kinds_of_pieces_may_be_missing():
    metadata = pieces_metadata(["ab"])
    del metadata["tokenizer.ggml.token_type"]
    assert build_gguf_tokenizer(metadata).encode("ab").tokens == ["▁", "ab"]


def test_texts_of_a_sentencepiece_vocabulary_begin_with_a_token_unless_told_otherwise():
    metadata = pieces_metadata()
    del metadata["tokenizer.ggml.add_bos_token"]
    assert build_gguf_tokenizer(metadata).encode("a").tokens == ["<s>", "▁", "a"]


def test_pieces_of_gemma_4_are_merged_in_the_order_that_its_file_tells():
    changes = {"model": "gemma4", "merges": ["b c", "a b"], "scores": None}
    built = build_gguf_tokenizer(pieces_metadata(["ab", "bc"], **changes))
    assert built.encode("abc ab").tokens == ["a", "bc", "▁", "ab"]
    assert built.decode(built.encode("abc ab").ids) == "abc ab"
    del changes["merges"]
    with pytest.raises(CheckpointError, match="holds no merges"):
        build_gguf_tokenizer(pieces_metadata(["ab", "bc"], **changes))


@pytest.mark.parametrize(("architecture", "strips"), [("phi3", True), ("llama", False)])
def test_marks_of_phi_3_take_the_spaces_behind_them(architecture, strips):
    built = build_gguf_tokenizer(pieces_metadata() | {"general.architecture": architecture})
    own = ["<|end|>", "▁", "a"] if strips else ["<|end|>", "▁", "<0x0A>", "a"]
    ids = built.encode("<|end|>\na<s>\n").ids
    assert list(map(built.id_to_token, ids)) == [*own, "<s>", "▁", "<0x0A>"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [0.0]}, "not one score for each"),
        ({"scores": None}, "not one score for each"),
        ({"pieces": ("a" * 257,)}, "257 characters"),
    ],
)
def test_spoilt_sentencepiece_vocabularies_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        build_gguf_tokenizer(pieces_metadata(**change))


def test_a_directory_loads_as_it_was_saved(tokenizer, tmp_path):
    tokenizer.hf.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert loaded.apply_chat_template(HI) == tokenizer.apply_chat_template(HI)


def test_a_template_of_a_model_that_also_sees_is_used_where_its_tokenizer_has_none(
    tokenizer, tmp_path
):
    """Mistral-Small-3.1-24B-Instruct-2503 has it in chat_template.json alone."""
    tokenizer.hf.save_pretrained(tmp_path)
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "[{{ messages[0].content }}]"}))
    own = tokenizer.apply_chat_template(HI)
    assert load_tokenizer(tmp_path).apply_chat_template(HI) == own != "[hi]"
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(tmp_path).apply_chat_template(HI) == "[hi]"
    file.write_text(json.dumps({"chat_template": ["[]"]}))
    with pytest.raises(CheckpointError, match=r"chat_template\.json holds no text chat_template"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "num_added"),
    [
        ({"add_bos_token": True}, 1),
        ({"add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}, 1),
        ({"add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}, 0),
        ({"add_bos_token": True, "bos_token": None}, 0),
        ({"add_bos_token": False}, 0),
        ({}, 0),
    ],
)
@pytest.mark.parametrize("adds_itself", [False, True])
def test_a_llama_tokenizer_s_texts_begin_as_its_config_says(
    tmp_path, changes, num_added, adds_itself
):
    """DeepSeek's tokenizer.json has a ByteLevel post-processor, which adds nothing."""
    backend = byte_tokenizer(("<s>", "</s>"))
    bos_id = backend.token_to_id("<s>")
    plain = tuple(backend.encode(TEXTS[0]).ids)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if adds_itself:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos_id)]
        )
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(TEXTS[0]) == (bos_id,) * max(num_added, adds_itself) + plain
    assert loaded.encode(TEXTS[0], add_special_tokens=False) == plain


def test_a_tokenizer_file_alone_loads_but_has_no_chat_template(backend, tmp_path):
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    loaded = load_tokenizer(path)
    assert loaded.encode(TEXTS[0]) == tuple(backend.encode(TEXTS[0]).ids)
    with pytest.raises(RequestError, match=r"no chat template.*Give a text"):
        loaded.apply_chat_template(HI)
    given = loaded.apply_chat_template([{"content": "hi"}], chat_template="{{ messages|length }}")
    assert given == "1"


#: Of harmony's kind: a macro, a date, a namespace, and channels in the place of roles.
HARMONY = """
{%- macro message(role, channel, text, end) -%}
<|start|>{{ role }}{% if channel %}<|channel|>{{ channel }}{% endif %}<|message|>{{ text }}{{ end }}
{%- endmacro -%}
{%- set system = namespace(text='Date: ' + strftime_now('%Y') + '\nReasoning: ') -%}
{%- set system.text = system.text + (reasoning_effort or 'medium') -%}
{{- message('system', none, system.text, '<|end|>') -}}
{%- for one in messages -%}
{%- if one.role == 'assistant' -%}
{{- message('assistant', 'final', one.content, '<|end|>') -}}
{%- elif one.role in ('user', 'developer') -%}
{{- message(one.role, none, one.content, '<|end|>') -}}
{%- else -%}
{{- raise_exception('no role ' + one.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""


def test_a_template_of_harmony_s_kind_is_rendered_like_any_other(tokenizer):
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    found = tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": "Why?"}],
        chat_template=HARMONY,
        add_generation_prompt=True,
        reasoning_effort="low",
    )
    system, *others = found.split("<|end|>")
    assert re.fullmatch(r"<\|start\|>system<\|message\|>Date: \d{4}\nReasoning: low", system)
    assert others == [
        "<|start|>user<|message|>2 + 2?",
        "<|start|>assistant<|channel|>final<|message|>4",
        "<|start|>user<|message|>Why?",
        "<|start|>assistant",
    ]
    with pytest.raises(RequestError, match="no role tool"):
        tokenizer.apply_chat_template([{"role": "tool"}], chat_template=HARMONY)


def test_a_template_that_refuses_is_the_request_s_error(tokenizer):
    with pytest.raises(RequestError, match=r"chat template refuses.*no system"):
        tokenizer.apply_chat_template(
            [{"role": "system", "content": "x"}],
            chat_template="{{ raise_exception('no system role') }}",
        )


#: Of Qwen3.5's kind: the system's message is the first, and other roles are refused.
STRICT = """\
{%- for message in messages %}
{%- if message.role == "system" and not loop.first or message.role not in ("system", "user") %}
{{- raise_exception("unexpected " ~ message.role) }}
{%- endif %}<{{ message.role }}>{{ message.content }}
{%- endfor %}"""
#: Of Qwen3's kind: messages of other roles are left out.
LENIENT = """\
{%- for message in messages if message.role in ("system", "user") -%}
<{{ message.role }}>{{ message.content }}
{%- endfor %}"""
#: Of gpt-oss's kind.
WITH_DEVELOPERS = """\
{%- for message in messages -%}
<{{ message.role if message.role != 'developer' else "dev" }}>{{ message.content }}
{%- endfor %}"""
INSTRUCTED = [
    {"role": "system", "content": "a"},
    {"role": "developer", "content": "b"},
    {"role": "user", "content": "hi"},
    {"role": "developer", "content": "c"},
]


@pytest.mark.parametrize("template", [STRICT, LENIENT])
def test_a_developer_s_message_reaches_a_model_whose_template_has_no_such_role(tokenizer, template):
    def rendered(*messages):
        return tokenizer.apply_chat_template(messages, chat_template=template)

    assert rendered(*INSTRUCTED) == "<system>a\n\nb<user>hi<user>c"
    assert rendered(*INSTRUCTED[1:3]) == "<system>b<user>hi"
    assert rendered(*INSTRUCTED[2:]) == "<user>hi<user>c"


def test_messages_are_the_template_s_where_it_knows_developers_or_none_speaks(tokenizer):
    found = tokenizer.apply_chat_template(INSTRUCTED, chat_template=WITH_DEVELOPERS)
    assert found == "<system>a<dev>b<user>hi<dev>c"
    system = {"role": "system", "content": "d"}
    found = tokenizer.apply_chat_template([system, system], chat_template=LENIENT)
    assert found == "<system>d<system>d"


@pytest.mark.parametrize("chosen", [{}, {"chat_template": "tool_use"}])
def test_messages_are_those_of_the_template_that_is_used_of_several(tokenizer, tmp_path, chosen):
    tokenizer.hf.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    loaded.hf.chat_template = {"default": WITH_DEVELOPERS, "tool_use": STRICT}
    strict = bool(chosen)
    found = loaded.apply_chat_template(INSTRUCTED, **chosen)
    assert found == ("<system>a\n\nb<user>hi<user>c" if strict else "<system>a<dev>b<user>hi<dev>c")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert loaded.apply_chat_template(INSTRUCTED, tools=tools) == "<system>a\n\nb<user>hi<user>c"
    assert WITH_DEVELOPERS in loaded.chat_template
    assert STRICT in loaded.chat_template


#: Of Mistral's kind: turns alternate.
ALTERNATING = """\
{%- for message in messages %}
{%- if not loop.first and message.role == messages[loop.index0 - 1].role %}
{{- raise_exception("twice " ~ message.role) }}
{%- endif %}<{{ message.role }}>{{ message.content }}
{%- endfor %}"""


#: Of gpt-oss's kind, too: all but the first message of the system is dropped.
WITH_ONE_SYSTEM = """\
{%- for message in messages if message == messages[0] or message.role == "user" -%}
<{{ message.role }}>{{ message.content }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        (STRICT, "<system>a\n\nb<user>hi\n\nc"),
        (ALTERNATING, "<system>a\n\nb<user>hi\n\nc"),
        (LENIENT, "<system>a<system>b<user>hi<system>c"),
        (WITH_ONE_SYSTEM, "<system>a\n\nb<user>hi\n\nc"),
    ],
)
def test_a_template_that_refuses_messages_gets_one_of_the_system_and_turns(
    tokenizer, template, rendered
):
    """OpenCode sent two of the system (anomalyco/opencode#16560), Codex two of the user."""
    messages = [
        message | {"role": message["role"].replace("developer", "system")} for message in INSTRUCTED
    ]
    assert tokenizer.apply_chat_template(messages, chat_template=template) == rendered


def test_many_instructions_are_looked_for_in_one_pass():
    class Searched(str):
        num_passed = 0

        def find(self, part, start=0):
            place = super().find(part, start)
            self.num_passed += (len(self) if place < 0 else place + len(part)) - start
            return place

        def __contains__(self, part):
            return self.find(part) >= 0

    said = [{"role": "user", "content": "a" * 99}]
    said += [{"role": "system", "content": f" {number} "} for number in range(300)]
    text = Searched("".join(message["content"] for message in said))
    assert template_inputs.shows_instructions(text, said)
    assert text.num_passed <= len(text)
    assert template_inputs.shows_instructions(text, [*said, said[1], said[300], said[2]])
    assert not template_inputs.shows_instructions(text, [*said, {"role": "system", "content": "b"}])


#: Of Mistral's kind: turns alternate, not counting calls and what they return.
TURNS = """\
{%- set turns = namespace(last="") %}
{%- for message in messages %}
{%- if not message.tool_calls and message.role != "tool" %}
{%- if message.role == turns.last %}{{ raise_exception("twice " ~ message.role) }}{% endif %}
{%- set turns.last = message.role %}
{%- endif %}<{{ message.role }}>{{ message.content }}
{%- endfor %}"""
#: Of Qwen3.5's kind.
WITH_A_USER = """\
{%- if not messages | selectattr("role", "eq", "user") | list %}{{ raise_exception("none") }}
{%- endif %}"""


@pytest.mark.parametrize(
    ("template", "said", "rendered"),
    [
        (TURNS, [("user", "a"), ("tool", "b"), ("user", "c")], "<user>a<tool>b\n\nc"),
        (TURNS, [("user", "a"), ("assistant", "b"), ("assistant", "")], "<user>a<assistant>b"),
        (TURNS, [("user", "a"), ("user", "b")], "<user>a\n\nb"),
        (WITH_A_USER + LENIENT, [("system", "a"), ("tool", "b")], "<user>a"),
        (WITH_A_USER + LENIENT, [("system", "a"), ("system", "b"), ("tool", "b")], "<user>a\n\nb"),
        (WITH_A_USER + LENIENT, [("tool", "b")], None),
    ],
)
def test_a_template_gets_the_turns_that_it_takes(tokenizer, template, said, rendered):
    """Users interrupt agents after a tool (mistral-vibe#255), and Dify sends no user (#33152)."""
    messages = [{"role": role, "content": content} for role, content in said]
    if rendered is not None:
        assert tokenizer.apply_chat_template(messages, chat_template=template) == rendered
        return
    with pytest.raises(RequestError, match="refuses the messages: none"):
        tokenizer.apply_chat_template(messages, chat_template=template)


def test_many_messages_of_a_turn_are_joined_once(tokenizer, monkeypatch):
    copied, join = [], template_inputs._joined

    def joined(messages, role):
        copied.append(sum(len(message["content"]) for message in messages))
        return join(messages, role)

    monkeypatch.setattr(template_inputs, "_joined", joined)
    messages = [{"role": "user", "content": "a"}] * 300
    text = tokenizer.apply_chat_template(messages, chat_template=ALTERNATING)
    assert text == "<user>" + "\n\n".join("a" * 300)
    assert sum(copied) < len(text)


def test_a_template_that_reads_one_call_of_a_message_gets_one(tokenizer):
    """Llama's refuses more, and gpt-oss's dropped them."""
    template = """\
{%- for message in messages -%}
<{{ message.role }}>{{ message.content }}{{ message.tool_calls[0].id if message.tool_calls }}
{%- endfor %}"""
    calls = [{"id": name, "function": {"name": name, "arguments": {}}} for name in ("f", "g", "h")]
    messages = [
        {"role": "assistant", "content": "a", "tool_calls": calls},
        {"role": "tool", "content": "of g", "tool_call_id": "g"},
        {"role": "tool", "content": "of f", "tool_call_id": "f"},
        {"role": "tool", "content": "of none"},
        {"role": "assistant", "content": "b", "tool_calls": calls[:1]},
    ]
    assert tokenizer.apply_chat_template(messages, chat_template=template) == (
        "<assistant>af<tool>of f<assistant>g<tool>of g<assistant>h<tool>of none<assistant>bf"
    )
    template += (
        "{% for message in messages %}{% for call in message.tool_calls %}{% endfor %}{% endfor %}"
    )
    assert tokenizer.apply_chat_template(messages, chat_template=template) == (
        "<assistant>af<tool>of g<tool>of f<tool>of none<assistant>bf"
    )


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ({}, "//"),
        ({"description": None}, "//"),
        ({"description": "does", "parameters": None}, "//does"),
        ({"parameters": {"properties": {"n": {"enum": [1, 2], "default": 1}}}}, "//, 1"),
        ({"parameters": {"properties": {"n": {"oneOf": [{}], "default": None}}}}, "//, null"),
        ({"parameters": {"properties": {"n": {"enum": ["a"], "default": "a"}}}}, "//, a"),
        ({"parameters": {"properties": {"n": {"default": 1}}}}, "//1"),
    ],
)
def test_a_tool_has_the_texts_that_a_template_joins(tokenizer, function, shown):
    """gpt-oss's joins its description, which OpenAI's API does not ask for, and some defaults."""
    template = """\
{%- for tool in tools %}{% set tool = tool.function %}{{ '//' + tool.description }}
{%- for spec in ((tool.parameters or {}).properties or {}).values() %}
{%- if spec.enum or spec.oneOf %}{{ ', ' + spec.default }}{% else %}{{ spec.default|tojson }}
{%- endif %}{% endfor %}{% endfor %}"""
    found = tokenizer.apply_chat_template(
        HI,
        chat_template=template,
        tools=[{"type": "function", "function": {"name": "f", **function}}],
    )
    assert found == shown


@pytest.mark.parametrize(
    ("asked", "shown"),
    [("minimal", "low"), ("medium", "medium"), ("high", "xhigh"), ("max", "xhigh"), ("x", None)],
)
def test_an_effort_that_a_template_refuses_is_the_nearest_that_it_names(tokenizer, asked, shown):
    """Qwen3.8's template has three, and Claude Code asks for ``high`` unless it is told not to."""
    template = """\
{%- if reasoning_effort not in ('xhigh', "medium", 'low') %}{{ raise_exception("unknown") }}
{%- endif %}{{ reasoning_effort }}"""

    def rendered():
        return tokenizer.apply_chat_template(HI, chat_template=template, reasoning_effort=asked)

    if shown is not None:
        assert rendered() == shown
        return
    with pytest.raises(RequestError, match="refuses the messages: unknown"):
        rendered()


@pytest.mark.parametrize(
    ("expression", "rendered"),
    [
        # DeepSeek's; the others are vLLM's for it, Kimi's and Ministral's.
        ("'<' + tool['function']['arguments'] + '>'", '<{"x": "é"}>'),
        ("'<' + tool['function']['arguments']|tojson + '>'", '<{"x": "é"}>'),
        ("'text' if tool.function.arguments is string else tool.function.arguments.x", "é"),
        ("'<' + (tool['function']['arguments'] | tojson)", '<{"x": "é"}'),
    ],
)
def test_arguments_of_calls_are_a_text_where_a_template_joins_them_to_one(
    tokenizer, expression, rendered
):
    template = f"{{% for tool in messages[0].tool_calls %}}{{{{ {expression} }}}}{{% endfor %}}"
    call = {"function": {"name": "f", "arguments": {"x": "é"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert tokenizer.apply_chat_template([message], chat_template=template) == rendered


def test_folders_beside_a_tokenizer_are_no_files_of_it(tokenizer, tmp_path):
    tokenizer.hf.save_pretrained(tmp_path)
    for name in ("figures.json", "notes.txt", "vocab.json"):
        (tmp_path / name).mkdir()
    assert load_tokenizer(tmp_path).encode("the") == tokenizer.encode("the")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read .*regular file"):
        load_tokenizer(tmp_path)


def test_missing_and_corrupt_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="no tokenizer at"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json, and its other") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        load_tokenizer(path)


@pytest.mark.network
def test_the_embedded_model_s_tokens_are_those_of_its_own_list():
    path = resolve_model("smollm2", lambda line: None)
    loaded = load_tokenizer(path)
    tokens = read_gguf(path).metadata["tokenizer.ggml.tokens"]
    assert [loaded.backend.id_to_token(i) for i in range(len(tokens))] == tokens
    text = "def f(a):\n    return a +  12\n<|im_end|> Grüße 日本 🎉"
    token_ids = loaded.encode(text)
    assert loaded.decode(token_ids, skip_special_tokens=False) == text
    # Two spaces and single digits, as SmolLM2 was trained; without the split: "Ġ", "Ġ", "1".
    assert [tokens[i] for i in loaded.encode("x =  1")] == ["x", "Ġ=", "ĠĠ", "1"]


def test_dummy_weights_need_no_tokenizer_but_use_one_that_is_there(tokenizer, tmp_path):
    dummy = EngineConfig(load_format="dummy")
    assert load_tokenizer_of(dummy, tmp_path) is None
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer_of(EngineConfig(), tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer_of(EngineConfig(load_format="dummy", tokenizer=str(tmp_path)), tmp_path)
    tokenizer.hf.save_pretrained(tmp_path)
    assert load_tokenizer_of(dummy, tmp_path).encode("the cat") == tokenizer.encode("the cat")
    assert load_tokenizer_of(EngineConfig(skip_tokenizer_init=True), tmp_path) is None
    other = EngineConfig(load_format="dummy", tokenizer=str(tmp_path))
    assert load_tokenizer_of(other, tmp_path / "elsewhere") is not None


def test_a_tokenizer_that_is_here_is_loaded_before_the_model_is_looked_up(tokenizer, tmp_path):
    tokenizer.hf.save_pretrained(tmp_path)
    for here in (EngineConfig(model=str(tmp_path)), EngineConfig(tokenizer=str(tmp_path))):
        assert load_tokenizer_here(here).encode("the cat") == tokenizer.encode("the cat")
    elsewhere = (EngineConfig(), EngineConfig(model="org/name"))
    skipped = EngineConfig(model=str(tmp_path), skip_tokenizer_init=True)
    assert [load_tokenizer_here(one) for one in (*elsewhere, skipped)] == [None] * 3
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        load_tokenizer_here(EngineConfig(model=str(tmp_path / "cut.gguf")))


def test_so_is_that_of_a_cached_model_once_its_weights_are_cached(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    tokenizer.hf.save_pretrained(tmp_path / "own")
    files = {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}
    folder = cache_snapshot(tmp_path / "hub", "org/name", files | {"config.json": b"{}"})
    of_the_hub = EngineConfig(model="org/name")
    assert load_tokenizer_here(of_the_hub) is None
    (folder / "model.safetensors").write_bytes(b"")
    assert load_tokenizer_here(of_the_hub).encode("the cat") == tokenizer.encode("the cat")
    assert load_tokenizer_here(replace(of_the_hub, skip_tokenizer_init=True)) is None
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer_here(of_the_hub)


def test_a_chat_template_that_is_no_jinja_is_named_as_such(tokenizer):
    with pytest.raises(RequestError, match="no valid Jinja at line 1"):
        tokenizer.apply_chat_template(HI, chat_template="{{ x")


def test_a_file_replaces_the_chat_template(tokenizer, tmp_path):
    tokenizer.hf.save_pretrained(tmp_path)
    file = tmp_path / "my.jinja"
    file.write_text("{% for one in messages %}<{{ one.content }}>{% endfor %}")
    loaded = load_tokenizer_of(EngineConfig(chat_template=str(file)), tmp_path)
    assert loaded.apply_chat_template(HI) == "<hi>"
    # A template may refuse messages, but it must be one.
    file.write_text("{{ raise_exception('only three messages') }}")
    load_tokenizer_of(EngineConfig(chat_template=str(file)), tmp_path)
    file.write_text("a\n{% for %}")
    with pytest.raises(ConfigError, match=r"my\.jinja has no valid Jinja at line 2"):
        load_tokenizer_of(EngineConfig(chat_template=str(file)), tmp_path)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"my\.jinja cannot be read"):
        load_tokenizer_of(EngineConfig(chat_template=str(file)), tmp_path)


LOOP = jinja2.Environment(autoescape=True).from_string("{% for i in range(n) %}{{ i }}{% endfor %}")


def test_a_template_within_the_bound_renders():
    with bounded_steps(1000):
        assert LOOP.render(n=3) == "012"


def test_one_beyond_it_is_broken_off():
    with pytest.raises(RuntimeError, match="more than 100 lines"), bounded_steps(100):
        LOOP.render(n=1000)


def test_other_code_is_not_counted():
    with bounded_steps(1):
        assert sum(i for i in range(1000)) == 499500


def test_whoever_traced_before_traces_again():
    def outer(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(outer)
    try:
        with pytest.raises(RuntimeError), bounded_steps(1):
            LOOP.render(n=10)
        assert sys.gettrace() is outer
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_those_of_the_text(text):
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(())))
    found = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]
    assert b"".join(found) == text.encode()


def test_the_bytes_of_tokens_that_are_named_by_them():
    vocab = {"<0xF0>": 0, "日": 1, "<0xf0>": 2}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.ByteFallback()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.decode_token(2) == "\ufffd"
    assert [tokenizer.token_bytes(one) for one in range(3)] == [b"\xf0", None, b"\xf0"]


def test_a_token_s_text_has_the_space_that_begins_it():
    words = ["a", "▁a", "▁", "▁▁", "▁<"]
    backend = Backend(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    replaced = decoders.Replace("▁", " ")
    stripped = decoders.Sequence([replaced, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    for decoder in (stripped, decoders.Metaspace(), replaced):
        backend.decoder = decoder
        tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
        assert [tokenizer.decode_token(one) for one in range(5)] == ["a", " a", " ", "  ", " <"]


def test_a_token_s_text_is_decoded_once(monkeypatch):
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(())))
    texts = [tokenizer.decode_token(one) for one in range(3)]
    monkeypatch.setattr(tokenizer, "decode", None)
    assert [tokenizer.decode_token(one) for one in range(3)] == texts


def test_a_space_as_a_byte_is_a_space():
    """As an answer may have it whose grammar allows the byte, though no encoder writes it."""
    vocab = {"a": 0, "<0x20>": 1, "<0x0A>": 2}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [tokenizer.decode_token(one) for one in range(3)] == ["a", " ", "\n"]


def test_the_tokens_of_a_draft_model_are_its_target_s_where_both_have_an_id():
    def of(*added: str) -> Tokenizer:
        return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(added)))

    fewer, last = of("<a>"), byte_tokenizer(("<a>",)).get_vocab_size()
    more = of("<a>", "<b>", "<c>")
    padded = of("<a>", f"[PAD{last}]", f"[PAD{last + 1}]")
    for draft in (fewer, more, padded):
        for target in (fewer, more, padded):
            require_same_tokens(draft, target)
    with pytest.raises(DrafterMismatchError, match=f"{last} is '<b>' to the draft .* '<d>' to the"):
        require_same_tokens(more, of("<a>", "<d>"))
