from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chat_model import CHAT_TEMPLATE
from helpers.parsing import assert_adds_up
from sametoken.serving.http.custom_inputs import with_inputs
from sametoken.serving.http.gemma_calls import GEMMA_MARKS, parse_gemma4
from sametoken.serving.http.json_calls import (
    GRANITE_MARKS,
    HUNYUAN_TAGS,
    parse_granite,
    parse_hermes,
    parse_hunyuan,
    parse_llama3_json,
    parse_required,
)
from sametoken.serving.http.named_calls import (
    DEEPSEEK_MARKS,
    KIMI_MARKS,
    MISTRAL_MARKS,
    parse_deepseek_v3,
    parse_deepseek_v31,
    parse_kimi_k2,
    parse_mistral,
)
from sametoken.serving.http.parsed import FoundCall, Parsed, parse_nothing, with_one_call
from sametoken.serving.http.pythonic_calls import OLMO_TAGS, parse_olmo3
from sametoken.serving.http.tool_parsers import TOOL_PARSERS, named_parser, parser_of_template
from sametoken.serving.http.xml_calls import (
    MINIMAX_TAGS,
    SEED_TAGS,
    glm_parser,
    minimax_m2_parser,
    qwen3_coder_parser,
    seed_oss_parser,
)

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'
ADD = FoundCall("add", '{"a": 1, "b": [2, "}"]}')
ONE = '{"x": 1}'
F_AND_G = (FoundCall("f", ONE), FoundCall("g", "{}"))


def called(*arguments, name="f", content=""):
    """Calls of one function."""
    return Parsed(content, tuple(FoundCall(name, one) for one in arguments))


#: Some models write several calls between one pair of tags.
PAIR = '{"name": "f", "arguments": {"x": 1}}\n{"name": "g"}\n'
HERMES = {
    CALL: Parsed("", (ADD,)),
    f"Let me see.\n\n{CALL}\n{CALL}\n": Parsed("Let me see.", (ADD, ADD)),
    f"{CALL} and then {CALL}": Parsed(" and then", (ADD, ADD)),
    "just text  \n": Parsed("just text  \n"),
    "less < than, <tool, <tool_cal": Parsed("less < than, <tool, <tool_cal"),
    "<tool_call>not a call</tool_call> text": Parsed("<tool_call>not a call</tool_call> text"),
    '<tool_call>{"nome": 1}</tool_call>': Parsed('<tool_call>{"nome": 1}</tool_call>'),
    '<tool_call>{"name": "now"}</tool_call>': called("{}", name="now"),
    '<tool_call>{"name": "f", "arguments": {"x": "cut of': called('{"x": "cut of'),
    '<tool_call>{"arguments": {"x": 1}, "name": "f"}': called('{"x": 1}'),
    '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>': called('{"x": 1}'),
    '<tool_call>{"name": "f", "arguments": {"x": 1} oops}</tool_call>': called('{"x": 1}'),
    '<tool_call>{"name": "f", "arguments": null}</tool_call>': called("{}"),
    '<tool_call>{"name": "f", "arguments": ""}</tool_call>': called("{}"),
    '<tool_call>{"name": "f", "arguments": nul': called(""),
    # Half of a surrogate pair is no text, so it could not be sent.
    '<tool_call>{"name": "f\\ud83d", "arguments": "{\\"x\\": \\"\\ud83d\\"}"}</tool_call>': called(
        '{"x": "\ufffd"}', name="f\ufffd"
    ),
    f"<tool_call>{PAIR}</tool_call> then": Parsed(" then", F_AND_G),
    f"<tool_call>{PAIR}": Parsed("", F_AND_G),
    f"<tool_call>[{PAIR}]</tool_call>": Parsed("", F_AND_G),
}
#: Arguments with the closing tag in a string; and others, whose quotes hide no tag.
WITH_TAG = ('{"x": "a </tool_call> b"}', '{"</tool_call>" : ["\\"<tool_call>{}</tool_call>" ]}')
BROKEN = ('{"x": 5" wide}', '{"x": "5" wide"}', '{"x": "a}')
for written in WITH_TAG:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call> then'
    HERMES[text] = called(written, content=" then")
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps(written)}}}</tool_call>'
    HERMES[text] = called(written)
for written in BROKEN:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    HERMES[f"{text} then"] = called(written + "}", content=" then")
    HERMES[f"{text}\n{CALL}"] = Parsed("", (FoundCall("f", written + "}"), ADD))
LLAMA = {
    '{"name": "add", "parameters": {"a": 1}}': called('{"a": 1}', name="add"),
    '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", '
    '"parameters": {"y": 2}}': Parsed("", (FoundCall("f", "{}"), FoundCall("g", '{"y": 2}'))),
    '{"name": "f", "parameters": {}} Done. ': called("{}", content="Done."),
    '{"name": "f", "parameters": {}} {"no": 1}': called("{}", content='{"no": 1}'),
    '{"name": "Ann", "age": 3}': Parsed('{"name": "Ann", "age": 3}'),
    '{"name": "Ann"}': Parsed('{"name": "Ann"}'),
    '{"name": ': Parsed('{"name": '),
    '  {"a": 1}': Parsed('  {"a": 1}'),
    "plain text": Parsed("plain text"),
    "": Parsed(""),
    "<|python_tag|>": Parsed("<|python_tag|>"),
    "<|python_tag|>print(1)": Parsed("<|python_tag|>print(1)"),
    '{"name": "f", "parameters": {"x": "cut': called('{"x": "cut'),
}
SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "place": {"type": "object"},
        "note": {"type": ["string", "null"]},
        "any": {},
        "odd": True,
        "title": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "size": {"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/size"}]},
        "color": {"allOf": [{"$ref": "#/$defs/color"}], "default": "red"},
        "code": {"enum": ["1", "2"]},
        "fixed": {"const": "1"},
        "loop": {"$ref": "#/$defs/loop"},
        "far": {"$ref": "#/$defs/0"},
        "gone": {"$ref": "#/nowhere/0"},
    },
    "$defs": {
        "size": {"type": "string"},
        "color": {"$ref": "#/$defs/named"},
        "named": {"enum": ["7", "red"], "type": "string"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
        **{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)},
        "3000": {"type": "string"},
    },
}
parse_qwen = qwen3_coder_parser({"f": SCHEMA, "odd": {"properties": [1]}})


def xml(*parameters, name="f", end="</function>\n</tool_call>"):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}{end}"


def bare(*parameters, end="</function>"):
    return xml(*parameters, end=end).removeprefix("<tool_call>\n")


QWEN = {
    f"I look.\n{xml(('city', 'Paris'), ('days', 3))}\n": called(
        '{"city": "Paris", "days": 3}', content="I look."
    ),
    xml(("city", "3")): called('{"city": "3"}'),
    xml(("city", 'two\nlines, "quoted" é\t<b>')): called(
        '{"city": "two\\nlines, \\"quoted\\" é\\t<b>"}'
    ),
    xml(("city", "\n")): called('{"city": "\\n"}'),
    xml(("city", "")): called('{"city": ""}'),
    "<tool_call><function=f><parameter=city>x</parameter></function></tool_call>": called(
        '{"city": "x"}'
    ),
    xml(("metric", "True"), ("place", "[1]")): called('{"metric": true, "place": [1]}'),
    xml(("days", "many"), ("days", "NaN")): called('{"days": "many", "days": "NaN"}'),
    xml(("note", "null")): called('{"note": null}'),
    xml(("note", "12")): called('{"note": "12"}'),
    # Pydantic's form of an optional text.
    xml(("title", "12"), ("title", "null")): called('{"title": "12", "title": null}'),
    xml(("size", "12"), ("size", "true")): called('{"size": 12, "size": "true"}'),
    xml(("color", "7"), ("code", "1"), ("fixed", "1")): called(
        '{"color": "7", "code": "1", "fixed": "1"}'
    ),
    xml(("loop", "1"), ("gone", "1")): called('{"loop": "1", "gone": 1}'),
    xml(("far", "1")): called('{"far": "1"}'),
    xml(("any", "[1]"), ("odd", "1.5")): called('{"any": [1], "odd": 1.5}'),
    xml(("unknown", "1")): called('{"unknown": "1"}'),
    xml(("x", "1"), name="odd"): called('{"x": "1"}', name="odd"),
    xml(name="now"): called("{}", name="now"),
    xml(("city", "a")) + xml(("city", "b")): called('{"city": "a"}', '{"city": "b"}'),
    xml(("city", "a"), end="</tool_call>"): called('{"city": "a"}'),
    xml(end="<parameter=city>\ncut of</para"): called('{"city": "cut of'),
    xml(("city", "a"), end="<parameter=days>\n1"): called('{"city": "a"'),
    xml(end="<parameter=city>\na</tool_call>"): called('{"city": "a"}'),
    # A value ends at its own tag, whatever is in it.
    f"{xml(('city', 'a</tool_call>b'), ('days', 1))} then": called(
        '{"city": "a</tool_call>b", "days": 1}', content=" then"
    ),
    xml(("city", "<tool_call>\n<function=g>\n</function>\n</tool_call>")): called(
        '{"city": "<tool_call>\\n<function=g>\\n</function>\\n</tool_call>"}'
    ),
    xml(end="<parameter=city>\na</tool_call> then"): called('{"city": "a"}', content=" then"),
    xml(end="<parameter=days>\n1\n</function>\n</tool_call>"): called('{"days": 1}'),
    xml(end="<parameter=city>\na\n</function>\n</tool_call>"): called('{"city": "a"}'),
    xml(end="<parameter=city>a</function></tool_call>"): called('{"city": "a"}'),
    "<tool_call><function=f><parameter=city</tool_call>": called("{}"),
    "<tool_call>\n{}\n</tool_call>": Parsed("<tool_call>\n{}\n</tool_call>"),
    "<tool_call>\n<function=f": Parsed("<tool_call>\n<function=f"),
    "1 < 2": Parsed("1 < 2"),
    xml(("city", "<a>\n</parameter>\n</a>"), ("days", 1)): called(
        '{"city": "<a>\\n</parameter>\\n</a>", "days": 1}'
    ),
    xml(("city", "<parameter=x>\n1\n</parameter>")): called(
        '{"city": "<parameter=x>\\n1\\n</parameter>"}'
    ),
    xml(("city", "a</parameter> <b")): called('{"city": "a</parameter> <b"}'),
    # The outer tags may be missing around the functions that there are.
    f"I look.\n\n{bare(('city', 'Paris'))}\n</tool_call>\n": called(
        '{"city": "Paris"}', content="I look."
    ),
    f"{bare(('city', 'a'))}\n{bare(('days', 1))}": called('{"city": "a"}', '{"days": 1}'),
    f"{bare(('city', '</function>'))} then": called('{"city": "</function>"}', content=" then"),
    f"{bare()}</tool_call>{xml(('city', 'a'))}": called("{}", '{"city": "a"}'),
    f"{bare()}\n</tool_": called("{}", content="\n</tool_"),
    bare(end="<parameter=city>\na\n</function>"): called('{"city": "a"}'),
    bare(end="<parameter=city>\na<</function>"): called('{"city": "a<"}'),
    bare(end="<parameter=city>\ncut of"): called('{"city": "cut of'),
    "Write <function=g>\n</function>": Parsed("Write <function=g>\n</function>"),
    "Write <function=f": Parsed("Write <function=f"),
    xml(("city", "a"), end="</function>\n<function=g>\n</function>\n</tool_call>"): Parsed(
        "", (FoundCall("f", '{"city": "a"}'), FoundCall("g", "{}"))
    ),
}
parse_seed = seed_oss_parser({"f": SCHEMA})


def seed(text):
    """A text of Qwen with Seed's tags."""
    return text.replace("tool_call>", "seed:tool_call>")


SEED = {
    seed(text): Parsed(seed(expected.content), expected.calls)
    for text, expected in QWEN.items()
    if "odd" not in text and not any("tool_call" in one.arguments for one in expected.calls)
}
parse_minimax = minimax_m2_parser({"f": SCHEMA})


def invoke(*parameters, name="f", quote='"', end="</invoke>\n"):
    inner = "".join(
        f"<parameter name={quote}{key}{quote}>{value}</parameter>\n" for key, value in parameters
    )
    return f"<invoke name={quote}{name}{quote}>\n{inner}{end}"


def minimax(*calls, end=MINIMAX_TAGS[1]):
    return f"{MINIMAX_TAGS[0]}\n{''.join(calls)}{end}"


MINIMAX = {
    f"I look.\n{minimax(invoke(('city', 'Paris'), ('days', 3)), invoke(name='now'))} then": Parsed(
        "I look. then", (FoundCall("f", '{"city": "Paris", "days": 3}'), FoundCall("now", "{}"))
    ),
    # A value is all that is between its tags, whatever it is.
    minimax(invoke(("city", "\n a\n"), ("place", '{"a": [1]}'), ("days", "[é"))): called(
        '{"city": "\\n a\\n", "place": {"a": [1]}, "days": "[é"}'
    ),
    minimax(
        invoke(), invoke(("city", f"{MINIMAX_TAGS[1]}</invoke></parameter> <b")), invoke()
    ): called("{}", f'{{"city": "{MINIMAX_TAGS[1]}</invoke></parameter> <b"}}', "{}"),
    minimax(invoke(("city", "a"), quote="'"), invoke(("days", "1"), quote="")): called(
        '{"city": "a"}', '{"days": 1}'
    ),
    minimax(invoke(end='<parameter name="city">cut of</param'), end=""): called('{"city": "cut of'),
    minimax(invoke(end='<parameter name="city">a</parameter> <parameter na'), end=""): called(
        '{"city": "a'
    ),
    minimax(invoke(end='<parameter name="city">a</invoke>')): called('{"city": "a"}'),
    # The outer tags may be missing around the functions that there are.
    f"I look.\n{invoke(('city', 'a'))}{MINIMAX_TAGS[1]}{invoke()}": called(
        '{"city": "a"}', "{}", content="I look."
    ),
    f"Write {invoke(name='g')}": Parsed(f"Write {invoke(name='g')}"),
    'Write <invoke name="f': Parsed('Write <invoke name="f'),
    minimax("no call"): Parsed(minimax("no call")),
}
parse_glm = glm_parser({"f": SCHEMA})


def glm(*parameters, name="f", between="\n"):
    """A call of GLM-4.5 and 4.6; of 4.7 without anything between."""
    tags = "".join(
        f"{between}<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>"
        for key, value in parameters
    )
    return f"<tool_call>{name}{tags}{between}</tool_call>"


CITY = "<tool_call>f<arg_key>city</arg_key>"
GLM = {
    f"I look.\n{glm(('city', 'Paris'), ('days', 3))}\n": called(
        '{"city": "Paris", "days": 3}', content="I look."
    ),
    glm(("city", "3"), ("metric", "true"), between=""): called('{"city": "3", "metric": true}'),
    glm(("city", "\n a \n")): called('{"city": "\\n a \\n"}'),
    glm(("place", '{"a": [1]}'), ("title", "null"), ("note", "12")): called(
        '{"place": {"a": [1]}, "title": null, "note": "12"}'
    ),
    glm(("days", "[1"), ("city", "")): called('{"days": "[1", "city": ""}'),
    glm(name="now"): called("{}", name="now"),
    glm(name="now", between=""): called("{}", name="now"),
    glm(("city", "a"), between="") + glm(("city", "b"), between="") + " then": called(
        '{"city": "a"}', '{"city": "b"}', content=" then"
    ),
    # A value ends at its own tag, whatever is in it.
    glm(("city", "<tool_call>g</tool_call> <arg_key>x</arg_key>"), ("days", 1)): called(
        '{"city": "<tool_call>g</tool_call> <arg_key>x</arg_key>", "days": 1}'
    ),
    glm(("city", "a</arg_value> b")): called('{"city": "a</arg_value> b"}'),
    f"{CITY}<arg_value>cut of</arg_v": called('{"city": "cut of'),
    f"{CITY}<arg_value>a</tool_call> then": called('{"city": "a"}', content=" then"),
    f"{CITY}<arg_key>days</arg_key><arg_value>1</arg_value></tool_call>": called("{}"),
    f"{CITY}Paris, France</arg_value></tool_call>": called('{"city": "Paris, France"}'),
    "Calls begin with <tool_call> and a name": Parsed("Calls begin with <tool_call> and a name"),
    '<tool_call>{"name": "f"}</tool_call>': Parsed('<tool_call>{"name": "f"}</tool_call>'),
    "<tool_call>now": Parsed("<tool_call>now"),
}


def in_section(marks, *bodies):
    """Calls with marks around them, and the last of the marks for @."""
    section, section_end, begin, end, mark = marks
    calls = "\n".join(f"{begin}{body.replace('@', mark)}{end}" for body in bodies)
    return section + calls + section_end


def deepseek(*bodies):
    return in_section(DEEPSEEK_MARKS, *bodies)


def kimi(*bodies):
    return in_section(KIMI_MARKS, *bodies)


def fenced(name, arguments):
    return f"function@{name}\n```json\n{arguments}\n```"


#: Arguments with marks in a string, which are text.
QUOTED = json.dumps(
    {"x": f"a {DEEPSEEK_MARKS[3]} {KIMI_MARKS[3]}[TOOL_CALLS]```"}, ensure_ascii=False
)
BEGUN = deepseek("function@f\n```js").partition(DEEPSEEK_MARKS[3])[0]
DEEPSEEK_V3 = {
    "I look.\n" + deepseek(fenced("f", ONE), fenced("g", "{}")): Parsed("I look.", F_AND_G),
    deepseek(fenced("f", QUOTED)) + " then": called(QUOTED, content=" then"),
    deepseek(fenced("g", "")): called("{}", name="g"),
    deepseek(f"function@f\n{ONE}"): called(ONE),
    BEGUN: Parsed(BEGUN),
    # The marks after the arguments may be missing.
    f"{BEGUN}on\n{QUOTED}": called(QUOTED),
}
DEEPSEEK_V31 = {
    f"I look.{deepseek(f'f@{ONE}', 'g@')} then": Parsed("I look. then", F_AND_G),
    deepseek(f"f@{QUOTED}"): called(QUOTED),
    deepseek('f@{"x": 5" wide}') + " then": called('{"x": 5" wide}', content=" then"),
    deepseek('f@{"x": [1}') + deepseek("g@null"): Parsed(
        "", (FoundCall("f", '{"x": [1}'), FoundCall("g", "{}"))
    ),
    deepseek(f"f@{ONE}").partition("call\u2581end")[0]: called(ONE, content="<\uff5ctool\u2581"),
    deepseek("no call"): Parsed(deepseek("no call")),
    f"{DEEPSEEK_MARKS[0]}\n<": Parsed(f"{DEEPSEEK_MARKS[0]}\n<"),
}
KIMI = {
    f"I look.{kimi(f'functions.f:0@{ONE}', 'functions.g:1@')}": Parsed("I look.", F_AND_G),
    kimi(f" functions.f:12 @ {QUOTED} ") + " then": called(QUOTED, content=" then"),
    kimi("functions.a.b-c:0@{}", "g:1@{}"): Parsed(
        "", (FoundCall("a.b-c", "{}"), FoundCall("g", "{}"))
    ),
    kimi(f"functions.f:0@{ONE}").replace(KIMI_MARKS[3], "") + kimi("functions.g:1@{}"): Parsed(
        "", F_AND_G
    ),
    kimi("functions.f:0@Paris"): called("Paris"),
    kimi('functions.f:0@{"x": "cut of').partition(KIMI_MARKS[3])[0]: called('{"x": "cut of'),
}
CALLS, CALL_ID, ARGS = MISTRAL_MARKS
MISTRAL = {
    f"I look.{CALLS}f{ARGS}{ONE}{CALLS}g{ARGS}{{}}": Parsed("I look.", F_AND_G),
    f"{CALLS}f{CALL_ID}a1b2c3d4e{ARGS}{ONE} {CALLS}g{{}} then": Parsed(" then", F_AND_G),
    f'{CALLS} [{{"name": "f", "arguments": {ONE}, "id": "a1b2c3d4e"}}, {{"name": "g"}}]': Parsed(
        "", F_AND_G
    ),
    f'{CALLS}[{{"name": "f", "arguments": {{"x": "cut': called('{"x": "cut'),
    f"{CALLS}f{ARGS}{QUOTED} then": called(QUOTED, content=" then"),
    f'{CALLS}f{ARGS}{{"x": [1}}{CALLS}g{ARGS}{{}}': Parsed(
        "", (FoundCall("f", '{"x": [1}'), FoundCall("g", "{}"))
    ),
    f"{CALLS} are calls": Parsed(f"{CALLS} are calls"),
    f"{CALLS}f{ARGS[:3]}": Parsed(f"{CALLS}f{ARGS[:3]}"),
    "[TOOL": Parsed("[TOOL"),
}
GEMMA_CALL, GEMMA_END, Q = GEMMA_MARKS


def gemma(arguments, name="f", end=GEMMA_END):
    return f"{GEMMA_CALL}call:{name}{{{arguments.replace('@', Q)}{end}"


GEMMA = {
    f"I look.{gemma('x:1}')}{gemma('}', 'g')} then": Parsed("I look. then", F_AND_G),
    gemma('city:@Paris, "the" {c} <b>@,a b:[@x@,-1.5,true,{k:None}],@q@:{}}'): called(
        '{"city": "Paris, \\"the\\" {c} <b>", "a b": ["x", -1.5, true, {"k": null}], "q": {}}'
    ),
    gemma(f"x:@é {GEMMA_END} b@}}") + " then": called(
        f'{{"x": "é {GEMMA_END} b"}}', content=" then"
    ),
    gemma(" x : Paris , é : 1 }"): called('{"x": "Paris", "é": 1}'),
    gemma("x:@cut é <|", end=""): called('{"x": "cut é '),
    gemma("x:12", end=""): called('{"x": '),
    gemma("x:@a") + " then": called('{"x": "a"', content=" then"),
    gemma("x:1}", end="") + gemma("}", "g", end=f" {GEMMA_END[:4]}"): Parsed(
        f" {GEMMA_END[:4]}", F_AND_G
    ),
    gemma("x:NaN,y:007}"): called('{"x": "NaN", "y": "007"}'),
    f"{GEMMA_CALL}no call{GEMMA_END}": Parsed(f"{GEMMA_CALL}no call{GEMMA_END}"),
}
LIST = f'[{{"name": "f", "arguments": {ONE}}}, {{"name": "g", "arguments": {{}}}}]'
HUNYUAN = {
    LIST.join(("I look.\n<tool_calls>", "</tool_calls> then")): Parsed("I look. then", F_AND_G),
    f'<tool_calls>\n[{{"name": "f", "arguments": {WITH_TAG[0]}}}]\n</tool_calls>': called(
        WITH_TAG[0]
    ),
    "<tool_calls>[1]</tool_calls>": Parsed("<tool_calls>[1]</tool_calls>"),
}
GRANITE = {
    f"{GRANITE_MARKS[0]} {LIST}": Parsed("", F_AND_G),
    f"I look.<tool_call>{LIST}": Parsed("I look.", F_AND_G),
    f"{GRANITE_MARKS[0]}[1]": Parsed(f"{GRANITE_MARKS[0]}[1]"),
    "<|tool": Parsed("<|tool"),
}


def olmo(*calls, end=OLMO_TAGS[1]):
    return OLMO_TAGS[0] + "\n".join(calls) + end


OLMO = {
    f"I look.\n{olmo('f(x=1)', 'g()')} then": Parsed("I look. then", F_AND_G),
    olmo(
        "\nf(x='Paris, \"the\" {c}', y = [1, -1.5, True, null, ], z={'k': (None, false)},)\n"
    ): called(
        '{"x": "Paris, \\"the\\" {c}", "y": [1, -1.5, true, null], "z": {"k": [null, false]}}'
    ),
    # Escapes of either language, and quotes that have none.
    olmo(r"""f(x='it\'s \d \n\u00e9\\', y="\ud83d\ude00 \"", z='a's b')""" "\n"): called(
        r"""{"x": "it's \\d \n\u00e9\\", "y": "\ud83d\ude00 \"", "z": "a's b"}"""
    ),
    olmo(f"f(x='a {OLMO_TAGS[1]}\n b')") + " then": called(
        f'{{"x": "a {OLMO_TAGS[1]}\\n b"}}', content=" then"
    ),
    olmo("a.b-c(x=007, y=1_é)"): called('{"x": "007", "y": "1_é"}', name="a.b-c"),
    olmo("f(x=1") + " then": called('{"x": 1', content=" then"),
    olmo("f(x='a'"): called('{"x": "a"'),
    olmo("f(x='cut of\\", end=""): called('{"x": "cut of'),
    olmo("f(x='cut \\u00"): called('{"x": "cut \\\\u00"'),
    olmo("f(x=12", end=""): called('{"x": '),
    olmo("f('Paris')"): Parsed(olmo("f('Paris')")),
    olmo("f(x"): Parsed(olmo("f(x")),
}
PARSED = {
    parse_hermes: HERMES,
    parse_hunyuan: HUNYUAN,
    parse_granite: GRANITE,
    parse_olmo3: OLMO,
    parse_seed: SEED,
    parse_minimax: MINIMAX,
    parse_gemma4: GEMMA,
    parse_deepseek_v3: DEEPSEEK_V3,
    parse_deepseek_v31: DEEPSEEK_V31,
    parse_kimi_k2: KIMI,
    parse_mistral: MISTRAL,
    parse_glm: GLM,
    parse_qwen: QWEN,
    parse_llama3_json: LLAMA,
}
CASES = [(parser, *case) for parser, cases in PARSED.items() for case in cases.items()]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_a_whole_answer(parser, text, expected):
    assert parser(text, True) == expected


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_a_stream_adds_up_to_the_whole(parser, text, expected):
    assert_adds_up(parser, text)


PIECES = st.sampled_from(
    [
        *DEEPSEEK_MARKS,
        *KIMI_MARKS,
        *MISTRAL_MARKS,
        *GEMMA_MARKS,
        *HUNYUAN_TAGS,
        *MINIMAX_TAGS,
        *OLMO_TAGS,
        *SEED_TAGS,
        GRANITE_MARKS[0],
        "call:f{",
        # Begun calls, as few marks in a row are one.
        f"{DEEPSEEK_MARKS[2]}f{DEEPSEEK_MARKS[4]}",
        f"{KIMI_MARKS[2]}f{KIMI_MARKS[4]}",
        "[TOOL_CALLS]f[ARGS]",
        "<|tool_call>call:f{x:",
        "<tool_call>f<arg_key>city</arg_key>",
        '<minimax:tool_call><invoke name="f"><parameter name="city">',
        "<seed:tool_call><function=f><parameter=city>",
        "<function_calls>f(x=",
        "<function_calls>f(x='",
        '<invoke name="f">',
        '<parameter name="days">',
        "</invoke>",
        "f(x=",
        ", y=",
        ")",
        "'",
        ",",
        "[",
        "```json",
        "f",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        '{"name": "f"',
        ', "arguments": ',
        ', "parameters": {"x": ',
        '"text"',
        "{",
        "}",
        "}}",
        ";",
        " ",
        "\n",
        "1",
        '"',
        "\\",
        "\\u00",
        "\\ud83d",
        '{"input": ',
        "text",
        "<",
        "<function=f>",
        "<parameter=city>",
        "<parameter=days>",
        "</parameter>",
        "</function>",
        "<arg_key>city",
        "<arg_key>days",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ]
)


@settings(max_examples=250)
@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.lists(PIECES, max_size=10).map("".join),
    st.sampled_from([(), ("f",)]),
)
def test_a_stream_of_anything_adds_up(name, text, custom):
    assert_adds_up(with_inputs(TOOL_PARSERS[name]({"f": SCHEMA}), custom), text)


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ('{"input": "a\\n\\ud83d\\ude00\\d"}', "a\n😀\\d"),
        ('{"why": {}, "input": "a"', "a"),
        ('{"input": "cut \\', "cut "),
        ("{}", ""),
        # Not as the schema says.
        ('{"text": 1}', '{"text": 1}'),
        ('{"input": 1}', '{"input": 1}'),
        ('{"a" "b"}', '{"a" "b"}'),
        ("*** Begin", "*** Begin"),
    ],
)
def test_the_text_of_a_custom_tool(arguments, taken):
    parser = with_inputs(named_parser("f"), ("f",))
    assert parser(arguments, True).calls == (FoundCall("f", taken),)
    assert with_inputs(named_parser("f"), ())(arguments, True).calls[0].arguments == arguments
    assert_adds_up(parser, arguments)


def test_arguments_are_shown_as_they_come():
    sizes = [
        len(parsed.calls[0].arguments)
        for length in range(len(CALL))
        if (parsed := parse_hermes(CALL[:length], False)).calls
    ]
    assert sizes[0] == 1
    assert max(b - a for a, b in itertools.pairwise(sizes)) == 1


def test_texts_are_shown_as_they_come():
    text = xml(("city", "Paris, France"))
    sizes = [
        len(parsed.calls[0].arguments)
        for length in range(len(text))
        if (parsed := parse_qwen(text[:length], False)).calls
    ]
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= len('{"city": "')
    assert len(set(sizes)) > len("Paris, France")


def test_forced_calls():
    text = json.dumps([{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}])
    assert parse_required(text, True).calls == (FoundCall("f", '{"x": 1}'), FoundCall("g", "{}"))
    assert_adds_up(parse_required, text)
    named = named_parser("f")
    assert named('{"x": 1}', True) == Parsed("", (FoundCall("f", '{"x": 1}'),))
    assert_adds_up(named, '{"x": 1}')
    assert parse_nothing(CALL, True) == Parsed(CALL)


def test_the_template_tells_the_parser():
    assert parser_of_template(CHAT_TEMPLATE) == "hermes"
    assert parser_of_template("... <|python_tag|> ...") == "llama3_json"
    assert parser_of_template("<tool_call>\n<function=name>") == "qwen3_coder"
    assert parser_of_template("<tool_call>{function-name}<arg_key>{key}</arg_key>") == "glm45"
    assert parser_of_template(f"{DEEPSEEK_MARKS[0]} ... '```json'") == "deepseek_v3"
    assert parser_of_template(DEEPSEEK_MARKS[0]) == "deepseek_v31"
    assert parser_of_template(KIMI_MARKS[0]) == "kimi_k2"
    assert parser_of_template("'<|tool_call>call:' + name") == "gemma4"
    assert parser_of_template("'[TOOL_CALLS]' + name") == "mistral"
    assert parser_of_template("<|start|>assistant<|channel|>analysis<|message|>") == "openai"
    assert parser_of_template("<minimax:tool_call>\n<invoke name=") == "minimax_m2"
    assert parser_of_template("<seed:tool_call>\n<function=name>") == "seed_oss"
    assert parser_of_template("respond only with <|tool_call|>") == "granite"
    assert parser_of_template("'<function_calls>' + name + '('") == "olmo3"
    assert parser_of_template('<tool_calls>[{"name": ') == "hunyuan_a13b"
    assert parser_of_template("<tool_calls><tool_sep>") is None
    assert parser_of_template("{{ message.content }}") is None


@pytest.mark.parametrize("text", HERMES)
def test_calls_after_the_first_are_left_out_and_no_text(text):
    one, whole = with_one_call(parse_hermes), HERMES[text]
    found = one(text, True)
    assert (found.content, list(found.calls)) == (whole.content, list(whole.calls[:1]))
    assert_adds_up(one, text)
