"""One word per thing: the synonyms that the glossary lists do not occur in the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sametoken

PACKAGE = Path(sametoken.__file__).parent
GLOSSARY = PACKAGE.parents[1] / "docs" / "glossary.md"
SYNONYM = re.compile(r"^- (?P<word>[\w ]+): use (?P<instead>[\w ]+) instead", re.MULTILINE)
EXPLAINED = re.compile(r"^\| (?P<words>[^|]+) \|", re.MULTILINE)


def synonyms() -> dict[str, str]:
    """Words that are not used, and what is said instead."""
    return {m["word"]: m["instead"] for m in SYNONYM.finditer(GLOSSARY.read_text("utf-8"))}


def synonyms_in(source: str) -> list[tuple[int, str, str]]:
    """Lines with a synonym as a word or an identifier of its own, and what to say instead."""
    found = []
    for word, instead in synonyms().items():
        pattern = re.compile(rf"(?<!\w)_*{word}s?(?!\w)", re.IGNORECASE)
        for number, line in enumerate(source.splitlines(), 1):
            found += [(number, match.group(), instead) for match in pattern.finditer(line)]
    return sorted(found)


def placeholder_tokens_in(source: str) -> list[int]:
    """Lines where a token id of -1 is made or compared: there are no placeholder tokens."""
    name = r"\w*(token|draft)_?ids?\w*"
    patterns = (
        rf"\b{name}(\[[^\]]*\])?\s*(=|==|!=)\s*(\[\s*)?-1\b",
        rf"\b{name}\s*(:[^=]*)?=\s*torch\.full(_like)?\([^\n]*,\s*-1\b",
        r"=\s*\[-1\]\s*\*",
        rf"\b{name}\.(append|fill_)\(-1\)",
        r"(?i)\bplaceholder_(token|id)\w*",
    )
    lines = source.splitlines()
    return [n for n, line in enumerate(lines, 1) if any(re.search(p, line) for p in patterns)]


def over_package(check) -> dict[str, list]:
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h")]
    found = {
        path.relative_to(PACKAGE).as_posix(): check(path.read_text("utf-8")) for path in sources
    }
    return {name: places for name, places in found.items() if places}


def test_no_synonyms_in_the_package():
    assert over_package(synonyms_in) == {}


def test_no_placeholder_tokens_in_the_package():
    assert over_package(placeholder_tokens_in) == {}


def test_the_glossary_forbids_the_field_s_worst_synonyms():
    worst = {"rollback", "rewind", "undo", "accept_len", "num_rejected", "seq_group", "req_idx"}
    assert worst <= synonyms().keys()


def test_what_is_said_instead_is_explained():
    text = GLOSSARY.read_text("utf-8")
    explained = " ".join(m["words"] for m in EXPLAINED.finditer(text)).replace("_", " ")
    # Spelled for code, or words that need no line of their own.
    known = {"request", "draft", "row budget", "num query", "num blocks"}
    for instead in synonyms().values():
        for word in re.split(" and | or ", instead):
            spelled = word.replace("_", " ")
            assert spelled in known or re.search(rf"\b{spelled}\b", explained), word


@pytest.mark.parametrize("form", ["{} = 1", "x = 1  # the {}s of it", '"""The {} of it."""'])
def test_every_synonym_is_found_in_code_strings_and_comments(form):
    for word, instead in synonyms().items():
        assert (1, instead) in [(line, say) for line, _, say in synonyms_in(form.format(word))]


def test_the_words_that_are_used_are_not_synonyms():
    source = "acceptance_length = num_accepted + 1  # the bonus counted; scrollback, row_slots"
    assert synonyms_in(source) == []


@pytest.mark.parametrize(
    "line",
    [
        "token_ids[row] = -1",
        "draft_ids = torch.full((2, 3), -1)",
        "spec_token_ids = [-1] * k",
        "if token_id == -1:",
        "output_token_ids.append(-1)",
        "PLACEHOLDER_TOKEN_ID = 0",
    ],
)
def test_placeholder_tokens_are_found(line):
    assert placeholder_tokens_in(line) == [1]
    assert placeholder_tokens_in("tokens[-1]\nsizes = view(-1)\ntoken_ids[-1] = 3") == []
