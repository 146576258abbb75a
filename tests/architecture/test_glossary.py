"""One word per thing: synonyms of the glossary's words do not occur in the package."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

import sametoken

PACKAGE = Path(sametoken.__file__).parent
GLOSSARY = PACKAGE.parents[1] / "docs" / "glossary.md"
WORDS = (
    "target",
    "drafter",
    "slot",
    "num_tokens",
    "num_computed",
    "window",
    "num_drafts",
    "num_accepted",
    "acceptance length",
    "next_token",
    "stage",
    "verify",
    "commit",
    "propose",
    "block",
    "block table",
)
# A pattern over identifiers and words, and what to say instead.
FORBIDDEN = {
    r"roll(s|ed|ing)?_?back": "commit makes accepted tokens true; there is nothing to undo",
    r"rewind|rewound|undo(es|ne)?": "commit makes accepted tokens true; nothing is undone",
    r"accept(ed)?_len(gth)?s?|acceptance_lens?": "num_accepted, or acceptance_length",
    r"num_accepted_drafts|accept(ed)?_counts?": "num_accepted",
    r"num_rejected(_\w+)?": "num_drafts and num_accepted",
    r"num_draft_(ids|len)|draft_lens?": "num_drafts",
    r"seq(uence)?_groups?": "request",
    r"seq_?lens?|query_?lens?|context_?lens?": "num_tokens, num_computed or num_query",
    r"bonus_(token|id)\w*": "next_token",
    r"proposers?|speculator|draft_worker": "drafter (the checkpoint format is `speculators`)",
    r"page_table|pages?_per_\w+|num_pages": "block table, block",
    r"batch_idx|req_idx|row_idx": "slot",
}


def words_of(source: str) -> list[tuple[int, str]]:
    """Identifiers, and words of strings and comments, each with its line."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            for offset, line in enumerate(token.string.splitlines()):
                words = re.findall(r"[A-Za-z_]\w*", line)
                found += [(token.start[0] + offset, word) for word in words]
    return found


def forbidden_in(source: str) -> list[tuple[int, str, str]]:
    """Lines, synonyms found there, and what to say instead."""
    return [
        (line, word, instead)
        for line, word in words_of(source)
        for pattern, instead in FORBIDDEN.items()
        if re.fullmatch(pattern, word.strip("_"), re.IGNORECASE)
    ]


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


def test_no_synonyms_in_the_package():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        found += [(name, *place) for place in forbidden_in(path.read_text())]
    assert found == []


def test_no_placeholder_tokens_in_the_package():
    found = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := placeholder_tokens_in(path.read_text()))
    }
    assert found == {}


def test_the_glossary_explains_every_word():
    text = GLOSSARY.read_text(encoding="utf-8")
    missing = [word for word in WORDS if not re.search(rf"\b{word}\b", text)]
    assert missing == []


@pytest.mark.parametrize(
    "word",
    [
        "rollback",
        "roll_back",
        "rewind",
        "accept_len",
        "accepted_lengths",
        "num_rejected_tokens",
        "seq_group",
        "seq_lens",
        "bonus_token_ids",
        "Proposer",
        "req_idx",
    ],
)
def test_synonyms_are_found_in_code_strings_and_comments(word):
    assert forbidden_in(f"{word} = 1")
    assert forbidden_in(f"x = 1  # the {word} of it")
    assert forbidden_in(f'"""The {word} of it."""')


def test_the_field_s_own_words_are_not_synonyms():
    source = "acceptance_length = num_accepted + 1  # the bonus counted; scrollback"
    assert forbidden_in(source) == []


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
