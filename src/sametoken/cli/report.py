"""Text and JSON of outputs, settings and memory, and a console wide enough for tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sametoken.types.outputs import RequestOutput
from sametoken.types.units import in_units

if TYPE_CHECKING:
    from sametoken.bench.memory import Memory
    from sametoken.cli.console import Console
    from sametoken.engine.resolve import ResolvedConfig


def tokens_per_second(output: RequestOutput) -> float:
    """Compute tokens per second after the first token; 0 if there is no other."""
    metrics = output.metrics
    if metrics.first_token_time is None or metrics.finished_time is None:
        return 0.0
    elapsed = metrics.finished_time - metrics.first_token_time
    num_tokens = len(output.outputs[0].token_ids) - 1
    return num_tokens / elapsed if elapsed > 0 else 0.0


def time_to_first_token(output: RequestOutput) -> float:
    """Compute the seconds from arrival to the first token; 0 without one."""
    metrics = output.metrics
    return (metrics.first_token_time or metrics.arrival_time) - metrics.arrival_time


def first_difference(one: RequestOutput, other: RequestOutput) -> int | None:
    """The index of the first different token of two answers; None if all are equal."""
    left, right = one.outputs[0].token_ids, other.outputs[0].token_ids
    for position, (token, twin) in enumerate(zip(left, right, strict=False)):
        if token != twin:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def compared(plain: RequestOutput, drafted: RequestOutput) -> str:
    """Both speeds of an answer without and with drafts, and whether its tokens are the same."""
    base, rate = tokens_per_second(plain), tokens_per_second(drafted)
    times = f" ({rate / base:.2f}x)" if base else ""
    differs = first_difference(plain, drafted)
    same = f"the same {len(drafted.outputs[0].token_ids)} tokens"
    agreement = same if differs is None else f"the tokens differ from number {differs + 1} on"
    return f"[plain {base:.1f} tokens/s, with drafts {rate:.1f}{times}: {agreement}]"


def per_position(rates: Sequence[float], num_shown: int = 8) -> str:
    """Format acceptance at the first ``num_shown`` draft positions, in percent; - without any."""
    shown = " ".join(f"{100 * rate:.0f}" for rate in rates[:num_shown])
    more = " .." if len(rates) > num_shown else ""
    return f"{shown}{more}%" if rates else "-"


def summary(output: RequestOutput, synthetic: Sequence[str] = ()) -> str:
    """Summarize a finished request in one line; begins with ``EngineConfig.synthetic``."""
    completion = output.outputs[0]
    warning = "".join(f"{what.upper()}; " for what in synthetic)
    line = (
        f"[{warning}{len(output.prompt_token_ids)} prompt tokens, first token after "
        f"{time_to_first_token(output):.2f} s; {len(completion.token_ids)} tokens, "
        f"{tokens_per_second(output):.1f} tokens/s; {completion.finish_reason}"
    )
    speculation = output.metrics.speculation
    if speculation.num_draft_tokens:
        line += (
            f"; acceptance length {speculation.acceptance_length:.2f}, "
            f"per position {per_position(speculation.acceptance_per_position)}"
        )
    return line + "]"


def as_json(output: RequestOutput, synthetic: Sequence[str] = ()) -> dict[str, Any]:
    """Convert a finished request to JSON values; ``synthetic`` as in ``summary``."""
    completion, speculation = output.outputs[0], output.metrics.speculation
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "synthetic": list(synthetic),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "tokens_per_second": tokens_per_second(output),
        "time_to_first_token": time_to_first_token(output),
        "num_cached_tokens": output.metrics.num_cached_tokens,
        "speculation": {
            **asdict(speculation),
            "acceptance_length": speculation.acceptance_length,
            "acceptance_rate": speculation.acceptance_rate,
            "acceptance_per_position": speculation.acceptance_per_position,
        },
    }


def explain(resolved: ResolvedConfig) -> str:
    """List every setting on one line, with the reason if the engine chose it."""
    from sametoken.engine.summary import explanation

    settings = explanation(resolved)
    width = max(len(setting.name) for setting in settings)
    return "\n".join(
        f"{setting.name:<{width}}  {setting.value}"
        + (f"  ({setting.reason})" if setting.reason else "")
        for setting in settings
    )


def memory_report(memory: Memory) -> str:
    """List the counted memory, beside that of a recurrent state per draft position."""
    request, k = memory.request, memory.request.num_drafts
    lines = {
        "weights": memory.weights,
        "drafter's own weights": memory.draft_weights,
        "KV per token": request.kv_per_token + request.draft_kv_per_token,
        f"KV per block of {memory.block_size} tokens": memory.kv_per_block,
    }
    if request.recurrent_state:
        lines["recurrent state per request"] = request.recurrent_state
    if request.recurrent_state and k:
        lines[f"pending inputs of {k} drafts, per request"] = request.all_pending
        lines["  (one recurrent state per draft would take)"] = request.state_per_draft
    if memory.num_kept_states:
        lines["a kept state, for prefix caching"] = request.kept_state
        lines[f"  {memory.num_kept_states} of them, of the KV memory"] = memory.kept_states
    lines |= {
        f"a request of {memory.max_model_len} tokens": memory.per_request,
        "  of which speculation adds": memory.speculation_per_request,
        f"weights and {memory.max_num_seqs} of these requests": memory.total,
    }
    lines[f"a step of {memory.max_num_batched_tokens} rows, while it runs"] = memory.step
    if memory.swap.host:
        lines["host memory for swapped KV, at most"] = memory.swap.host
    if memory.swap.file:
        lines["disk for swapped KV, at most"] = memory.swap.file
    drafts = f"{memory.method}, {k} drafts" if memory.method else "no speculation"
    head = f"{memory.model}, {memory.dtype}, {drafts}: counted, nothing is loaded"
    width = max(map(len, lines))
    return "\n".join([head, *(f"{name:<{width}}  {in_units(n):>9}" for name, n in lines.items())])


def report_results(
    document: Mapping[str, Any], output: Path | None, as_json: bool, show: Callable[[], None]
) -> None:
    """Write measured results if a file is given, and print them even where it cannot be written."""
    from sametoken.bench.documents import write_json

    try:
        if output is not None:
            write_json(output, document)
    finally:
        if as_json:
            typer.echo(json.dumps(document))
        else:
            show()


_WIDTH = 120


def announce(line: str) -> None:
    """Print a line on stderr."""
    typer.echo(line, err=True)


def status_console() -> Console:
    """Make a console on stderr, for progress; brackets and colons of names are text."""
    from sametoken.cli.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def wide_console() -> Console:
    """Make a console as wide as the terminal; without one, wide enough for ``bench``'s tables.

    Brackets and colons of names are text.
    """
    from sametoken.cli.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    return Console(highlight=False, soft_wrap=True, width=width, markup=False, emoji=False)
