"""Print an answer while it is made: accepted drafts in green, and reasoning dim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sametoken.serving.http.parsed import Parsed, Parser, parse_nothing

if TYPE_CHECKING:
    from rich.console import Console

    from sametoken.types.outputs import RequestOutput

ACCEPTED_STYLE = "bold green"
REASONING_STYLE = "dim"


def shown(
    outputs: Iterable[RequestOutput],
    hf_tokenizer: Any,
    console: Console,
    parser: Parser = parse_nothing,
    aside: Console | None = None,
    *,
    marks: bool = False,
) -> Iterator[RequestOutput]:
    """Print the new text of every output and pass the output on.

    Args:
        outputs: a streamed request's, as from ``LLM.generate_stream``.
        hf_tokenizer: the model's, as from ``LLM.get_tokenizer``.
        console: shows the content; characters of an accepted draft in ``ACCEPTED_STYLE``.
        parser: parts reasoning from content.
        aside: shows the reasoning, in ``REASONING_STYLE``; None: nobody does.
        marks: whether the text has special tokens.
    """
    from sametoken.text.detokenizer import make_detokenizer
    from sametoken.text.tokenizer import Tokenizer

    tokenizer, detokenizer = Tokenizer(hf_tokenizer), None
    #: Of every character of the text.
    accepted: list[bool] = []
    before = Parsed("")
    num_ids = num_accepted = 0
    for output in outputs:
        completion = output.outputs[0]
        detokenizer = detokenizer or make_detokenizer(
            tokenizer, skip_special_tokens=not marks, prompt=output.prompt_token_ids
        )
        accepted_now = output.metrics.speculation.num_accepted_tokens - num_accepted
        for offset, token_id in enumerate(completion.token_ids[num_ids:]):
            accepted += [offset < accepted_now] * len(detokenizer.append(token_id))
        if output.finished:
            accepted += [False] * len(detokenizer.finish())
        num_ids, num_accepted = len(completion.token_ids), num_accepted + accepted_now
        parsed = parser(completion.text, output.finished)
        if aside is not None:
            _show_reasoning(before, parsed, aside)
        new = content_of(parsed)[len(content_of(before)) :]
        # What is new stands last in the text, before what the parser holds back.
        start = completion.text.rfind(new)
        _show(new, accepted[start : start + len(new)] if start >= 0 else [], console)
        before = parsed
        yield output


def content_of(parsed: Parsed) -> str:
    """The content, without the line breaks that part it from reasoning."""
    return parsed.content.lstrip("\n") if parsed.reasoning else parsed.content


def _show_reasoning(before: Parsed, parsed: Parsed, aside: Console) -> None:
    """Print new reasoning without white space around it, and the lines before the content."""
    whole = parsed.reasoning.strip()
    new = whole[len(before.reasoning.strip()) :]
    if whole and content_of(parsed) and not content_of(before):
        new += "\n\n"
    if new:
        aside.print(new, end="", style=REASONING_STYLE, markup=False, emoji=False)
        aside.file.flush()


def _show(text: str, accepted: list[bool], console: Console) -> None:
    """Print a text; where it is not known what was accepted, nothing was."""
    place = 0
    for is_accepted, run in groupby([*accepted, *[False] * (len(text) - len(accepted))]):
        end = place + len(list(run))
        style = ACCEPTED_STYLE if is_accepted else None
        console.print(text[place:end], end="", style=style, markup=False, emoji=False)
        place = end
    console.file.flush()
