"""Print an answer while it is made, with accepted drafts in green."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from sametoken.types.outputs import RequestOutput

ACCEPTED_STYLE = "bold green"


def shown(
    outputs: Iterable[RequestOutput], hf_tokenizer: Any, console: Console
) -> Iterator[RequestOutput]:
    """Print the new text of every output and pass the output on.

    Args:
        outputs: a streamed request's, as from ``LLM.generate_stream``.
        hf_tokenizer: the model's, as from ``LLM.get_tokenizer``.
        console: shows the text; a piece of an accepted draft in ``ACCEPTED_STYLE``.
    """
    from sametoken.text.detokenizer import make_detokenizer
    from sametoken.text.tokenizer import Tokenizer

    detokenizer = make_detokenizer(Tokenizer(hf_tokenizer), skip_special_tokens=True)
    pieces: deque[tuple[str, bool]] = deque()
    num_ids = num_accepted = num_shown = 0
    for output in outputs:
        completion = output.outputs[0]
        accepted_now = output.metrics.speculation.num_accepted_tokens - num_accepted
        for offset, token_id in enumerate(completion.token_ids[num_ids:]):
            pieces.append((detokenizer.append(token_id), offset < accepted_now))
        if output.finished:
            pieces.append((detokenizer.finish(), False))
        num_ids, num_accepted = len(completion.token_ids), num_accepted + accepted_now
        # The output's text leaves out a stop string, and holds back what may become one.
        num_shown += _show(pieces, len(completion.text) - num_shown, console)
        yield output


def _show(pieces: deque[tuple[str, bool]], num_chars: int, console: Console) -> int:
    """Print the first characters of the pieces and remove them; returns their number."""
    left = num_chars
    while pieces and left > 0:
        text, accepted = pieces.popleft()
        if len(text) > left:
            pieces.appendleft((text[left:], accepted))
        style = ACCEPTED_STYLE if accepted else None
        console.print(text[:left], end="", style=style, markup=False, emoji=False)
        left -= len(text[:left])
    console.file.flush()
    return num_chars - left
