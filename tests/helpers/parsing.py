"""The law of parsers of answers: a prefix's result is a prefix of the result."""

from __future__ import annotations

from sametoken.serving.http.parsed import FoundText, GrowingAnswer, Parsed, Parser, parsed_of


def extends(early: Parsed, late: Parsed) -> bool:
    """Whether what was shown early is a beginning of what is shown late."""
    return (
        late.content.startswith(early.content)
        and late.reasoning.startswith(early.reasoning)
        and len(early.calls) <= len(late.calls)
        and all(
            a.name == b.name and b.arguments.startswith(a.arguments)
            for a, b in zip(early.calls, late.calls, strict=False)
        )
    )


def assert_adds_up(parser: Parser, text: str) -> None:
    """A stream of any cuts of the text adds up to the whole."""
    whole = parser(text, True)
    shown = Parsed("")
    for length in range(len(text) + 1):
        parsed = parser(text[:length], False)
        assert extends(shown, parsed), (text[:length], shown, parsed)
        assert extends(parsed, parser(text[:length], True)), (text[:length], parsed)
        shown = parsed
    assert extends(shown, whole), (text, shown, whole)
    for size in (1, 5, len(text) + 1):
        answer = GrowingAnswer(parser)
        found = []
        for start in range(0, len(text), size):
            found += answer.read(text[start : start + size], finished=False)
        streamed = parsed_of([*found, *answer.read("", finished=True)])
        assert streamed == whole, (text, size)
        assert joined(streamed) == joined(whole), (text, size)


def joined(parsed: Parsed) -> list:
    """The parts in order, with texts that follow each other put together."""
    found: list = []
    for part in parsed.parts:
        last = found[-1] if found else None
        if isinstance(last, FoundText) and isinstance(part, FoundText) and last.kind == part.kind:
            found[-1] = FoundText(part.kind, last.text + part.text)
        else:
            found.append(part)
    return found
