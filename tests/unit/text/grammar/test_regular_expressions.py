"""Regular expressions that the grammar compiler would not honour, refused by name."""

from __future__ import annotations

import pytest
import xgrammar

from sametoken.errors import RequestError
from sametoken.text.grammar.regular_expressions import check_grammar, check_regex, plain_regex

CHARACTERS = [chr(code) for code in (9, 10, *range(32, 127), 0xE9, 0x1F389)]


@pytest.mark.parametrize(
    "pattern",
    [
        *("^ab$", "^a|b$", "a|$", "^$", "^", "$", "", r"\^a\$", r"a\$b", "[a^$]", "[^^]"),
        *(r"[\]^]", r"\\$", r"[\b]", r"\d\w\s\D\W\S\t\n\r\x41A\cA", "(?:a|b)(?<n>c)$"),
        *("a(=b)", r"\(\?=a\)", "[(?=]"),
    ],
)
def test_what_is_honoured_is_taken_without_a_warning(pattern, capfd):
    check_regex(pattern)
    xgrammar.Grammar.from_regex(plain_regex(pattern))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("pattern", "cause"),
    [
        ("a^b", r"the anchor \^"),
        ("^^a", r"the anchor \^"),
        ("(^a)", r"the anchor \^"),
        (r"\[^a", r"the anchor \^"),
        (r"\\^", r"the anchor \^"),
        ("[a]^", r"the anchor \^"),
        ("a$|b", r"the anchor \$"),
        ("a$$", r"the anchor \$"),
        ("a(?=b)", r"the lookahead \(\?="),
        ("a(?!b)", r"the lookahead \(\?!"),
        ("(?<=a)b", r"the lookbehind \(\?<="),
        ("(?<!a)b", r"the lookbehind \(\?<!"),
        (r"\ba", r"the escape \\b"),
        (r"a\Z", r"the escape \\Z"),
        (r"(a)\1", r"the escape \\1"),
        (r"[\p]", r"the escape \\p"),
        (r"\x{41}", r"the escape \\x"),
        (r"\u00g1", r"the escape \\u"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(pattern, cause):
    with pytest.raises(RequestError, match=cause):
        check_regex(pattern)


@pytest.mark.parametrize("form", [r"\%s", r"[\%s]", r"a\%s41", r"(\%s|b)", "%s", "a%s", "[^a%s]"])
def test_no_character_makes_the_compiler_warn(form, capfd):
    taken = 0
    for character in CHARACTERS:
        pattern = form % character
        try:
            check_regex(pattern)
            xgrammar.Grammar.from_regex(plain_regex(pattern))
        except (RequestError, RuntimeError):
            continue
        taken += 1
        assert capfd.readouterr().err == "", pattern
    assert taken > len(CHARACTERS) / 3


def test_a_backslash_that_nothing_needs_changes_nothing():
    assert plain_regex(r"\\\,\.\d") == r"\\\u002c\.\d"
    for character in " !#%&,:;<=>@_`~":
        for form in ("a%sb", "[%s]", "[%s-\x7f]"):
            escaped = xgrammar.Grammar.from_regex(plain_regex(form % f"\\{character}"))
            assert str(escaped) == str(xgrammar.Grammar.from_regex(form % character))
    # Read as U+041B before.
    assert str(xgrammar.Grammar.from_regex(plain_regex(r"\x41b"))) == 'root ::= (("A" "b"))\n'
    # A bare comma would make a repetition of it.
    with pytest.raises(RuntimeError):
        xgrammar.Grammar.from_regex(plain_regex(r"a{1\,2}"))


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" [b-c^$] # root[max_tokens=3] ::= Regex("a^b")',
        'root ::= Regex("^a[0-9]+$")',
        r'root ::= "Regex(\"a^b\")" "x[max_tokens=3] ::="',
        'root ::= [a] rest\nrest ::= [\\]"] "b"',
    ],
)
def test_a_grammar_that_is_kept_to_is_taken(text):
    check_grammar(text)
    xgrammar.Grammar.from_ebnf(text)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('root ::= "x" Regex("a^b")', "the anchor"),
        ('root ::= Regex( "a(?=b)" )', "the lookahead"),
        (r'root ::= Regex("a\\hb")', r"the escape \\h"),
        ('root ::= r "b"\nr[max_tokens=3] ::= "a"', "the attribute 'max_tokens=3'"),
        ('root [max_chars = 3] ::= "a"*', "the attribute 'max_chars = 3'"),
    ],
)
def test_a_grammar_with_parts_that_are_ignored_is_refused(text, cause):
    with pytest.raises(RequestError, match=cause):
        check_grammar(text)
