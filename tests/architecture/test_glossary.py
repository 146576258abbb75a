"""One word per thing: the glossary's synonyms occur in no source, no document and no test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from helpers.sources import PACKAGE

ROOT = PACKAGE.parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
LIST_OF_SYNONYMS = "## Words we do not use"
SYNONYM = re.compile(r"^- (?P<word>[\w ]+): use (?P<instead>[\w ]+) instead", re.MULTILINE)
EXPLAINED = re.compile(r"^\| (?P<words>[^|]+) \|", re.MULTILINE)
LINK_TARGET = re.compile(r"\]\([^)]*\)")

#: A file or folder and a synonym that it may have, with the reason.
EXCEPTIONS = {
    ("docs/audit.md", "verdict"): "what an audit finds is a verdict, to users and in its JSON",
    ("src/sametoken/audit", "verdict"): "the same",
    ("src/sametoken/cli/audit.py", "verdict"): "the same",
    ("src/sametoken/audit/verdict.py", "but for"): "a value in the JSON of audits",
    ("src/sametoken/bench/acceptance.py", "judged"): "a key in the JSON of audits",
    ("docs/benchmarking.md", "overlap"): "ranges of measurements do",
    ("src/sametoken/ops/lookup/ngram.py", "overlap"): "an occurrence and the suffix do",
    ("src/sametoken/text/grammar/json_schema.py", "overlap"): "branches of a schema do",
    ("src/sametoken/types/vllm_options.py", "spec_token"): "an option of vLLM is",
    ("CONTRIBUTING.md", "judged"): "people judge changes",
    ("CONTRIBUTING.md", "poisoned"): "memory of tests is, with NaN",
    ("tests", "poisoned"): "the same",
    ("tests", "poison"): "the same",
    ("tests", "undo"): "pytest's name of a method",
    ("tests/e2e", "verdict"): "of audits",
    ("tests/unit/audit", "verdict"): "the same",
    ("tests/e2e/test_audit_command.py", "judged"): "a key in the JSON of audits",
    ("tests/e2e/test_audit_transcript.py", "judged"): "the same",
    ("tests/unit/bench/test_acceptance.py", "judged"): "the same",
    ("tests/e2e/test_stress.py", "judge"): "a module of the stress test",
    ("tests/e2e/test_stress.py", "tally"): "a field of its results",
    ("tests/unit/ops/lookup", "overlap"): "matches do",
    ("tests/unit/text/grammar/test_json_schema.py", "overlap"): "branches of a schema do",
    ("docs/decisions/0010-recurrent-rows-in-sequence.md", "poisoned"): "the same",
}


@cache
def synonyms() -> dict[str, str]:
    """Words that are not used, and the word instead."""
    return {m["word"]: m["instead"] for m in SYNONYM.finditer(GLOSSARY.read_text("utf-8"))}


@cache
def synonyms_in(source: str) -> list[tuple[int, str, str]]:
    """Line, text and replacement of each synonym that is a word or an identifier of its own.

    A phrase may go on in the next line, in a comment too. A word with a capital is matched as
    it is written, others in any case.
    """
    found, lowered = [], source.lower()
    for word, instead in synonyms().items():
        text = lowered if word == word.lower() else source
        # Expressions are slow, and few files have all parts of a phrase.
        if not all(part in text for part in word.split()):
            continue
        phrase = word.replace(" ", r"[\s#*/]+")
        for match in re.finditer(rf"(?<!\w)_*{phrase}s?(?!\w)", text):
            found.append((source.count("\n", 0, match.start()) + 1, word, instead))
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


def sources() -> list[Path]:
    return [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h")]


def checked_tests() -> list[Path]:
    """All but this file, which plants synonyms, and the mutants, which may say what they break."""
    apart = {Path(__file__), *(ROOT / "tests" / "mutants" / "catalogue").iterdir()}
    return [path for path in (ROOT / "tests").rglob("*.py") if path not in apart]


def documents() -> list[Path]:
    return [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def prose_of(path: Path) -> str:
    """A file without names of other files, and the glossary without its list of synonyms."""
    text = path.read_text("utf-8")
    if path == GLOSSARY:
        text = text.partition(LIST_OF_SYNONYMS)[0]
    return LINK_TARGET.sub("]()", text) if path.suffix == ".md" else text


def found_in(paths: list[Path], check: Callable[[str], list]) -> Iterator[tuple[str, object]]:
    for path in sorted(paths):
        for found in check(prose_of(path)):
            yield path.relative_to(ROOT).as_posix(), found


def excepted(name: str, word: str) -> bool:
    return any(word == other and f"{name}/".startswith(f"{place}/") for place, other in EXCEPTIONS)


def unexpected(paths: list[Path]) -> list[str]:
    return [
        f"{name}:{line}: {word}, use {instead}"
        for name, (line, word, instead) in found_in(paths, synonyms_in)
        if not excepted(name, word)
    ]


def test_no_synonyms_in_the_package():
    assert unexpected(sources()) == []


def test_no_synonyms_in_the_documents():
    assert unexpected(documents()) == []


def test_no_synonyms_in_the_tests():
    assert unexpected(checked_tests()) == []


def test_every_exception_has_a_reason_and_is_used():
    assert all(EXCEPTIONS.values())
    found = {
        (name, word)
        for name, (_, word, _) in found_in(
            [*sources(), *documents(), *checked_tests()], synonyms_in
        )
    }
    for place, word in EXCEPTIONS:
        assert any(word == w and f"{name}/".startswith(f"{place}/") for name, w in found), place


def test_no_placeholder_tokens_in_the_package():
    assert list(found_in(sources(), placeholder_tokens_in)) == []


def test_the_glossary_forbids_the_field_s_worst_synonyms():
    worst = {"rollback", "rewind", "undo", "accept_len", "num_rejected", "seq_group", "req_idx"}
    assert worst <= synonyms().keys()


def test_the_glossary_forbids_what_was_retired():
    retired = {"row law", "company", "settle", "verdict", "judge", "poisoned", "stuck", "plan row"}
    assert retired <= synonyms().keys()


def test_what_is_said_instead_is_explained():
    text = GLOSSARY.read_text("utf-8").partition(LIST_OF_SYNONYMS)[0]
    explained = " ".join(m["words"] for m in EXPLAINED.finditer(text)).replace("_", " ")
    # Spelled for code, or words that need no line of their own.
    known = {"request", "num query", "num blocks", "except", "a number"}
    known |= {"gdc wait", "prefetch l2"}
    for instead in synonyms().values():
        for word in re.split(" and | or ", instead):
            spelled = word.replace("_", " ")
            assert spelled in known or re.search(rf"\b{spelled}\b", explained), word


@pytest.mark.parametrize("form", ["{} = 1", "x = 1  # the {}s of it", '"""The {} of it."""'])
def test_every_synonym_is_found_in_code_strings_and_comments(form):
    for word, instead in synonyms().items():
        assert (1, instead) in [(line, say) for line, _, say in synonyms_in(form.format(word))]


def test_a_phrase_is_found_across_lines():
    assert synonyms_in("x = 1  # keeps the row\n    # law")[0][:2] == (1, "row law")
    assert synonyms_in("/* all but\n * for one */")[0][:2] == (1, "but for")


def test_the_words_that_are_used_are_not_synonyms():
    source = "acceptance_length = num_accepted + 1  # the bonus counted; scrollback, row_slots"
    assert synonyms_in(source) == []
    assert synonyms_in("in front of it; it cuts the step short; test_a_settled_row") == []


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
