"""Structures compiled over tokens: what they allow, and what is refused."""

from __future__ import annotations

import json
import pickle
import threading

import pytest
import torch
from tokenizers import AddedToken

from sametoken.errors import OverloadedError, RequestError
from sametoken.text.grammar import trials as module
from sametoken.text.grammar.compiled import MAX_CHARACTERS, MAX_NESTING, MAX_WHITESPACE
from sametoken.text.grammar.grammar import GrammarCompiler, XGrammar
from sametoken.text.grammar.json_strings import MAX_COUNTED
from sametoken.text.grammar.trials import ThreadTrials
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.structured_outputs import StructuredOutputs

EOS, SECOND_EOS = 0, 333
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}


def tag_of(kind: str, **keys) -> dict[str, object]:
    """Of one format."""
    return {"structural_tag": {"type": "structural_tag", "format": {"type": kind, **keys}}}


TRIGGERED = {
    "triggers": ["<f="],
    "tags": [
        {
            "begin": "<f=a>",
            "content": {"type": "json_schema", "json_schema": NUMBERS, "style": "json"},
            "end": "</f>",
        },
        {"begin": "<f=b>", "content": {"type": "regex", "pattern": "é.|c"}, "end": ["!", "?"]},
    ],
}


@pytest.fixture(scope="module")
def vocab_size(tokenizer) -> int:
    """Padded, as those of real checkpoints are."""
    return len(tokenizer.hf) + 9


@pytest.fixture(scope="module")
def compiler(tokenizer, vocab_size) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size, (EOS, SECOND_EOS), ThreadTrials())


def allowed(matcher, vocab_size: int) -> set[int]:
    masks = torch.full((2, -(-vocab_size // 32)), 7, dtype=torch.int32)
    matcher.fill(masks, 1)
    assert (masks[0] == 7).all()
    bits = (masks[1, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return set(bits.flatten().nonzero().flatten().tolist())


def accepts(grammar, tokenizer, text: str) -> bool:
    matcher = grammar.new_matcher()
    taken = all(matcher.accept(t) for t in tokenizer.encode(text, add_special_tokens=False))
    return taken and matcher.accept(EOS)


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"regex": "(cat|dog) [0-9]{2}"}, ["cat 10", "dog 99"], ["cat 1", "cow 10", ""]),
        (
            {"json_schema": '{"type": "integer", "multipleOf": 1024}'},
            ["0", "2048", "-1024"],
            ["5", "1025", "102"],
        ),
        # As in Python and JavaScript, a point is no line break; Python's groups have names.
        (
            {"regex": r"a.(?P<end>[.]\.)"},
            ["ab..", "aé..", "a🎉..", "a..."],
            ["a\n..", "a\r..", "a\u2028..", "ab..\n", "abcd"],
        ),
        ({"regex": r"(?P<area_code>\d)(?<n1>[(?P<a>])"}, ["1(", "2P"], ["1b", "P"]),
        # In a class the compiler would read é and a as one character, and ^ as a negation.
        ({"regex": "[éa-z]"}, ["é", "a", "z"], ["\u0e9a", "-", "è"]),
        ({"regex": r"[\xe9a\x7f0\u00ff\u{e8}b]"}, ["é", "a", "\x7f", "0", "ÿ", "è", "b"], ["ê"]),
        ({"regex": r"[^é0À-ÿ\cAa]"}, ["b", "\x1a"], ["é", "0", "ï", "\x01", "a"]),
        ({"regex": r"[\^a]\^[\^]"}, ["^^^", "a^^"], ["b^^", "a^a"]),
        ({"regex": r"[\x5e\^-b-]{2}"}, ["^b", "a-", "_`"], ["c^", "]^"]),
        (
            {"json_schema": {"type": "string", "pattern": r"[éa-z\^]|[\^0]"}},
            ['"é"', '"a"', '"^"', '"0"'],
            ['"\u0e9a"', '"1"'],
        ),
        ({"json_schema": '{"pattern": "^(?P<a>.)$", "type": "string"}'}, ['"a"', '"."'], ['"\n"']),
        ({"grammar": 'root ::= "(" root ")" | "the"'}, ["the", "((the))"], ["(the", "()"]),
        ({"grammar": r'root ::= "\x41b" [^\x00-\x1Fa] "\\x41"'}, [r"Abb\x41"], ["\u041bb", "Aba"]),
        (
            tag_of("triggered_tags", **TRIGGERED),
            ["", "any", "<f=a>[1, 2]</f>", "a <f=b>éx! b <f=a>[3]</f>c", "<f=b>c?"],
            ["<f=a>[]</f>", "<f=b>é\n!", "<f=c>", "<f=b>c", "<f=a>[1]"],
        ),
        (
            tag_of(
                "sequence",
                elements=[
                    {"type": "optional", "content": {"type": "const_string", "value": "so "}},
                    {
                        "type": "or",
                        "elements": [
                            {"type": "grammar", "grammar": 'root ::= "(" root ")" | "the"'},
                            {
                                "type": "repeat",
                                "min": 1,
                                "max": 2,
                                "content": {
                                    "type": "tag",
                                    "begin": "<",
                                    "content": {"type": "any_text"},
                                    "end": ">",
                                },
                            },
                        ],
                    },
                ],
            ),
            ["((the))", "so <a><>", "<x y>"],
            ["", "so ", "(the", "<a><b><c>", "<a"],
        ),
        (
            {
                "structural_tag": json.dumps(
                    {
                        "structures": [{"begin": "<f>", "schema": NUMBERS, "end": "</f>"}],
                        "triggers": ["<f>"],
                    }
                )
            },
            ["", "see <f>[7]</f>."],
            ["<f>7</f>", "<f>[7]"],
        ),
        ({"choice": ("schöne 🎉", 'q"\\\n', "a")}, ["schöne 🎉", 'q"\\\n', "a"], ["b", "aa"]),
        (
            # As zod writes them: the compiler would take the format for the rule.
            {
                "json_schema": {
                    "type": "array",
                    "items": {"type": "string", "format": "email", "pattern": "^c@(a|b)$"},
                }
            },
            ['["c@a"]', '["c@a", "c@b"]'],
            ['["d@a"]', '["c@example.org"]'],
        ),
        # Bounds are those of their type, in a list of several too.
        (
            {"json_schema": {"type": ["integer", "string", "null"], "minimum": 3, "maxLength": 2}},
            ["3", "10", "null", '"ab"'],
            ["2", "-3", '"abc"', "true"],
        ),
        (
            # As pydantic writes dict[Annotated[str, Field(max_length=2)], int].
            {
                "json_schema": {
                    "type": "object",
                    "propertyNames": {"maxLength": 2},
                    "additionalProperties": {"type": "integer"},
                }
            },
            ["{}", '{"ab": 1}'],
            ['{"abc": 1}', '{"a": ""}'],
        ),
        # The compiler's own grammar, read again, means what it meant: ße is not U+07DFE.
        (
            {
                "json_schema": {
                    "properties": {
                        "größe": {"enum": ["éa", "ü0"]},
                        "s": {"type": "string", "maxLength": 1},
                    },
                    "additionalProperties": {"const": "üb"},
                }
                | {"type": "object", "required": ["größe"]}
            },
            ['{"größe": "éa"}', '{"größe": "ü0", "é": "üb"}'],
            ['{"gr\u00f6\u7dfe": "éa"}', '{"größe": "\u0e9a"}'],
        ),
        (
            tag_of("tag", begin="é", content={"type": "regex", "pattern": "[éa-z]+"}, end="a"),
            ["ééba"],
            ["ééb", "é\u0e9aa"],
        ),
        # Names are strings, and counted, whatever is said of them.
        (
            {"json_schema": {"propertyNames": {"title": "T"}, "additionalProperties": {}}},
            ["{}", '{"ab": 1}'],
            ["{1: 1}", "{null: 1}"],
        ),
        (
            {
                "json_schema": {
                    "type": "object",
                    "propertyNames": {"pattern": "^[a-z]$"},
                    "properties": {"a": {}, "b": {}},
                    "additionalProperties": False,
                    "minProperties": 2,
                }
            },
            ['{"a": 1, "b": 2}'],
            ["{}", '{"a": 1}', '{"c": 1, "d": 1}'],
        ),
        (
            {"json_schema": {"type": ["string", "null"], "format": "json-pointer"}},
            ['""', '"/"', '"/é/~0"', "null"],
            ['"a"', '"/~2"', '"/\n"', '"/\x1f"'],
        ),
        (
            {"json_schema": {"items": {"type": "string", "format": "relative-json-pointer"}}},
            ["[]", '["10", "0#", "1/~1é"]'],
            ['["1#a"]', '["/a"]', '["0/\n"]'],
        ),
        ({"json_object": True}, ["{}", '{"a": [1, null]}', '{\n  "x": {}\n}'], ["[1]", "1", "{"]),
        (
            {
                "json_schema": json.dumps(
                    {
                        "type": "object",
                        "properties": {"n": {"type": "integer", "maximum": 12}},
                        "required": ["n"],
                    }
                )
            },
            ['{"n": 12}', '{ "n":3 }'],
            ["{}", '{"n": 13}', '{"n": 1, "m": 2}', '{"n": "1"}'],
        ),
        # No other property has a property's name, however it is spelled.
        (
            {
                "json_schema": {
                    "type": "object",
                    "properties": {
                        name: {"const": 1}
                        for name in ("a", "abc", "é", "🎉é", 'q"b', "t\tx", "", "-]^")
                    },
                    "additionalProperties": {"type": "null"},
                }
            },
            [
                '{"ab": null, "è": null, "🎉": null, "q": null, "b": null}',
                '{"": 1, "b\\u0061": null}',
            ],
            [
                *(f'{{"{name}": null}}' for name in ("a", "abc", "é", "🎉é", "", "-]^")),
                *('{"\\u0061": null}', '{"ab\\u0063": null}', '{"\\u00e9": null}'),
                *('{"q\\"b": null}', '{"q"b": null}', '{"t\\tx": null}', '{"t\\u0009x": null}'),
                *('{"🎉\\u00e9": null}', '{"b": 1}'),
            ],
        ),
        # A pattern beside other names leaves a property what it is.
        (
            {
                "json_schema": '{"properties": {"n": {"const": 1}}, "patternProperties": '
                '{"^x": true}, "additionalProperties": true}'
            },
            ["{}", '{"n": 1}', '{"x": 2, "y": "3"}', '{"n": 1, "x": 2}'],
            ['{"n": 2}', '{"x": 2, "n": "1"}'],
        ),
    ],
)
def test_texts_of_the_form_are_accepted_and_no_others(fields, right, wrong, compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputs(**fields))
    assert [text for text in right if not accepts(grammar, tokenizer, text)] == []
    assert [text for text in wrong if accepts(grammar, tokenizer, text)] == []


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({"maxLength": 3}, ["", "aé", "🎉/'"]),
        ({"minLength": 2}, ["ab", "é" * 9]),
        ({"maxLength": 129}, ["", "é" * 129]),
        ({"pattern": "^[^é]{0,3}$"}, ["", "ab", "ü🎉"]),
        ({"pattern": ".*é"}, ["é", "🎉é"]),
        ({"pattern": "[^a-я🎉]+"}, ["A日"]),
    ],
)
@pytest.mark.parametrize("of", ["value", "name"])
def test_strings_of_a_schema_have_no_character_that_json_escapes(
    schema, right, of, compiler, tokenizer
):
    whole, form = {"type": "string", **schema}, "%s"
    if of == "name":
        whole = {"type": "object", "propertyNames": whole, "additionalProperties": {"const": 1}}
        if "pattern" in schema:
            whole["patternProperties"] = {schema["pattern"]: whole.pop("additionalProperties")}
            del whole["propertyNames"]
        form = "{%s: 1}"
    grammar = compiler.compile(StructuredOutputs(json_schema=json.dumps(whole)))
    for text in right:
        assert accepts(grammar, tokenizer, form % json.dumps(text, ensure_ascii=False)), text
    for character in '"\\\t\n\x00\x0b\x1f':
        for text in (character, f"{character}é", f"a{character}", f"ab{character}é"):
            assert not accepts(grammar, tokenizer, form % f'"{text}"'), text


#: Characters as JSON may write them; pairs of surrogates are one.
WRITTEN = ("a", "🎉", r"\n", r"\"", r"\\", r"\u00E9", r"\ud7ff", r"\ud83d\ude00", r"\uDBFF\uDFFF")


@pytest.mark.parametrize(
    ("least", "most"),
    [(0, 1), (1, 1), (2, 3), (3, None), (32, 32), (31, 65), (0, 128), (128, None)],
)
def test_escapes_of_a_string_are_one_character_each(least, most, compiler, tokenizer):
    # A property's name that looks like a rule of the compiler's is text.
    name = 'root_prop_0_characters{0, 3} [^"\\\r\n]'
    value = {"type": "string", "minLength": least, **({} if most is None else {"maxLength": most})}
    schema = {"type": "object", "properties": {name: value}, "required": [name]}
    grammar = compiler.compile(StructuredOutputs(json_schema=json.dumps(schema)))
    form = json.dumps(name).join(("{", ": %s}"))
    for length in (0, 1, 2, 3, 4, 30, 31, 32, 33, 65, 66, 127, 128, 129):
        for written in WRITTEN:
            text = f'"{written * length}"'
            assert len(json.loads(text)) == length
            is_right = least <= length and (most is None or length <= most)
            assert accepts(grammar, tokenizer, form % text) == is_right, (length, written)
        for broken in (r"\x", r"\u12", r"\ud83d", r"\ude00", r"\ud83d\n", "\t"):
            text = f'"{"a" * max(length - 1, 0)}{broken}"'
            assert not accepts(grammar, tokenizer, form % text), (length, broken)


@pytest.mark.parametrize("bound", ["minLength", "maxLength"])
def test_a_string_beyond_a_length_has_no_escapes(compiler, tokenizer, bound):
    schema = {"type": "string", bound: MAX_COUNTED + 1}
    grammar = compiler.compile(StructuredOutputs(json_schema=json.dumps(schema)))
    most = "a" * MAX_COUNTED
    assert accepts(grammar, tokenizer, f'"{most}b"')
    assert not accepts(grammar, tokenizer, f'"{most}\\n"')


def test_a_mask_allows_exactly_the_tokens_that_can_be_accepted(compiler, tokenizer, vocab_size):
    matcher = compiler.compile(StructuredOutputs(regex="th[a-e ]+cat|Grüße")).new_matcher()
    for token_id in tokenizer.encode("the "):
        found = allowed(matcher, vocab_size)
        assert token_id in found
        for other in range(vocab_size):
            assert matcher.copy().accept(other) == (other in found)
        assert matcher.accept(token_id)


def test_special_tokens_and_padding_are_no_text(compiler, tokenizer, vocab_size, capfd):
    matcher = compiler.compile(StructuredOutputs(regex="(.|\n)*")).new_matcher()
    found = allowed(matcher, vocab_size)
    blank = tokenizer.special_ids - {EOS} | {len(tokenizer.hf) + 1, len(tokenizer.hf) + 8}
    plain = tokenizer.hf.get_vocab()["<plain token>"]
    assert not found & (blank - {SECOND_EOS})
    assert {EOS, SECOND_EOS, plain} <= found
    assert not any(matcher.accept(token_id) for token_id in blank - {SECOND_EOS})
    assert capfd.readouterr().err == ""


def test_after_the_end_only_end_tokens_match(compiler, tokenizer, vocab_size, capfd):
    start = compiler.compile(StructuredOutputs(regex="a")).new_matcher()
    matcher, a = start.copy(), tokenizer.encode("a")[0]
    assert matcher.accept(a)
    assert allowed(matcher, vocab_size) == {EOS, SECOND_EOS}
    for end in (SECOND_EOS, EOS, EOS):
        assert matcher.accept(end)
        assert allowed(matcher, vocab_size) == {EOS, SECOND_EOS}
        assert not matcher.accept(a)
    assert allowed(matcher.copy(), vocab_size) == {EOS, SECOND_EOS}
    assert a in allowed(start, vocab_size)
    assert EOS not in allowed(start, vocab_size)
    assert capfd.readouterr().err == ""


def test_matchers_of_one_grammar_do_not_share_their_place(compiler, tokenizer, vocab_size):
    grammar = compiler.compile(StructuredOutputs(regex="ab"))
    first, second = grammar.new_matcher(), grammar.new_matcher()
    first.accept(tokenizer.encode("a")[0])
    assert allowed(first, vocab_size) != allowed(second, vocab_size)


def test_white_space_between_elements_is_bounded(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputs(json_object=True))
    assert accepts(grammar, tokenizer, "{" + " " * MAX_WHITESPACE + "}")
    assert not accepts(grammar, tokenizer, "{" + " " * (MAX_WHITESPACE + 1) + "}")


MARK = '<c\\"\n>'


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"json_object": True}, json.dumps({"a": MARK})),
        ({"json_schema": '{"enum": ["the", 1]}'}, '"the"'),
        ({"regex": "(the|a<c>)+"}, "thea<c>"),
        ({"grammar": 'root ::= "(" root ")" | "the"'}, "((the))"),
        ({"choice": ("cat", "<c>")}, "<c>"),
    ],
)
def test_a_text_of_the_kind_or_any_after_the_mark(fields, right, compiler, tokenizer, vocab_size):
    plain = compiler.compile(StructuredOutputs(**fields))
    either = compiler.compile(StructuredOutputs(**fields, free_after=MARK))
    assert accepts(plain, tokenizer, right)
    for grammar in (either, pickle.loads(pickle.dumps(either))):
        for text in (right, MARK, f"{MARK}\x00 é🎉\n</c>{MARK}{right}"):
            assert accepts(grammar, tokenizer, text), text
        for text in ("", MARK[:-1], f" {MARK}", f"{right}{MARK}", f"x{right}", right[:-1]):
            assert not accepts(grammar, tokenizer, text), text
    assert not accepts(plain, tokenizer, MARK)
    matcher = either.new_matcher()
    assert EOS not in allowed(matcher, vocab_size)
    for token_id in tokenizer.encode(MARK, add_special_tokens=False):
        assert matcher.accept(token_id)
    assert {EOS, SECOND_EOS, *tokenizer.encode("the cat 10 {")} <= allowed(matcher, vocab_size)


def test_a_grammar_is_compiled_once(compiler, monkeypatch):
    structured = StructuredOutputs(regex="once")
    kept = compiler.compile(structured)
    assert kept.is_ready()
    monkeypatch.setattr(XGrammar, "validate", None)
    again = compiler.compile(StructuredOutputs(regex="once"))
    assert again.is_ready()
    assert again._compiled is kept._compiled


def test_a_grammar_crosses_process_borders(compiler, tokenizer, vocab_size):
    grammar = compiler.compile(StructuredOutputs(regex="cat [0-9]"))
    payload = pickle.dumps(grammar)
    arrived = pickle.loads(payload)
    assert accepts(arrived, tokenizer, "cat 3")
    assert not accepts(arrived, tokenizer, "cat x")
    assert not arrived.new_matcher().accept(1)
    again = pickle.loads(payload)
    assert again.vocabulary is arrived.vocabulary is grammar.vocabulary
    assert again.is_ready(), "nothing is compiled twice"


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"regex": "(a"}, "regex is not valid: .*parenthesis"),
        ({"regex": "(?=a)b"}, "has the lookahead"),
        ({"regex": r"(a)\1"}, r"has the escape \\1"),
        ({"grammar": "root ::= x"}, 'grammar is not valid: .*"x" is not defined'),
        ({"grammar": 'a ::= "b"'}, "grammar is not valid: .*root"),
        ({"grammar": 'start: "a" | "b"'}, "Lark is not read. Write rules as NAME ::="),
        ({"grammar": "root ::= root"}, "no text matches"),
        ({"grammar": "root ::= root", "free_after": MARK}, "no text matches"),
        ({"regex": "a^b", "free_after": MARK}, "has the anchor"),
        ({"regex": "a", "free_after": "a" * MAX_CHARACTERS}, f"above {MAX_CHARACTERS}"),
        ({"json_schema": '{"type": "strin"}'}, "json_schema is not valid: .*strin"),
        ({"json_schema": '{"not": {}}'}, "not is not supported"),
        ({"json_schema": '{"type": "string", "pattern": "(?=a)"}'}, "has the lookahead"),
        ({"json_schema": '{"type": "string", "pattern": "a^b"}'}, "has the anchor"),
        ({"json_schema": '{"patternProperties": {"a^b": {}}}'}, "has the anchor"),
        ({"json_schema": '{"type": "string", "pattern": "a\\"b"}'}, "every text of the pattern"),
        ({"json_schema": r'{"type": "string", "pattern": "é\\\\d"}'}, "every text of the pattern"),
        ({"json_schema": r'{"patternProperties": {".\\n": {}}}'}, "every text of the pattern"),
        ({"grammar": 'root ::= Regex("a^b")'}, "has the anchor"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, f"above {MAX_CHARACTERS}"),
        ({"regex": "(" * (MAX_NESTING + 1)}, "nests brackets deeper"),
        ({"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}, "nests brackets"),
        ({"structural_tag": "{"}, "structural_tag is not JSON"),
        ({"structural_tag": "[]"}, "is none"),
        ({"structural_tag": {"format": None}}, "no format None"),
        (tag_of("token", token=3), "no format 'token'"),
        (tag_of("any_text", max_tokens=3), "any_text has no key 'max_tokens'"),
        (tag_of("json_schema", json_schema=NUMBERS, style="qwen_xml"), "no key 'style'"),
        (tag_of("json_schema", json_schema={"type": "x"}), "json_schema is not valid: .*x"),
        (tag_of("regex", pattern="a(?=b)"), "lookahead"),
        (tag_of("grammar"), "lacks 'grammar'"),
        (tag_of("grammar", grammar="root ::= x"), "not valid"),
        (tag_of("sequence", elements=[]), "'elements' of a structural_tag"),
        (tag_of("tag", begin={"type": "token", "token": 3}, content=1, end="a"), "no texts"),
        (tag_of("star", content=[]), r"no format \[\]"),
        (tag_of(["star"]), r"no format \['star'\]"),
        (tag_of("const_string"), "not valid"),
        ({"structural_tag": {"structures": [{"begin": "a"}], "trigger": ["a"]}}, "'trigger'"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_cause(fields, cause, compiler):
    with pytest.raises(RequestError, match=cause) as caught:
        compiler.compile(StructuredOutputs(**fields))
    assert caught.value.remedy
    assert "/cpp/" not in str(caught.value)


def test_a_slow_grammar_is_refused_in_time_and_others_go_on(tokenizer, vocab_size, monkeypatch):
    compiler = GrammarCompiler(tokenizer, vocab_size, (EOS,), ThreadTrials())
    build, gate = XGrammar.validate, threading.Event()

    def gated(grammar):
        if grammar.source.text.startswith("slow"):
            gate.wait()
        build(grammar)

    def refuse(source: str, cause: str, kind: type[Exception] = RequestError) -> None:
        monkeypatch.setattr(module, "TIME_LIMIT", 0.02)
        with pytest.raises(kind, match=cause):
            compiler.compile(StructuredOutputs(regex=source))
        monkeypatch.setattr(module, "TIME_LIMIT", 60)

    monkeypatch.setattr(XGrammar, "validate", gated)
    refuse("slow a", "took more than")
    assert compiler.compile(StructuredOutputs(regex="fast"))
    refuse("slow b", "took more than")
    refuse("any", "still being compiled", OverloadedError)
    gate.set()
    assert compiler.compile(StructuredOutputs(regex="any"))


def test_a_model_without_an_end_token_is_refused(tokenizer, vocab_size):
    with pytest.raises(RequestError, match="end-of-text"):
        GrammarCompiler(tokenizer, vocab_size, (), ThreadTrials())


def test_sentencepiece_vocabularies_are_understood():
    """Byte pieces, and a space written as U+2581."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces = {"</s>": 256, "▁cat": 257, "cat": 258, "▁": 259, "a": 260}
    backend = Backend(models.BPE(bytes_ | pieces, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    compiler = GrammarCompiler(tokenizer, 264, (256,), ThreadTrials())
    grammar = compiler.compile(StructuredOutputs(regex="cat cat é"))
    matcher = grammar.new_matcher()
    assert not matcher.accept(257)
    assert all(matcher.accept(t) for t in (258, 257, 259, 0xC3, 0xA9, 256))
