"""Outputs and settings as lines and JSON values.

Counted memory as lines.

A console whose tables are whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sametoken.types.outputs import (
    RequestOutput,
    SpeculationMetrics,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sametoken.bench.memory import Memory
    from sametoken.engine.resolve import ResolvedConfig


_SHOWN_POSITIONS = 8


def tokens_per_second(output: RequestOutput) -> float:
    """Tokens after the first over the time after the first; 0 if there is none."""
    metrics = output.metrics
    if metrics.first_token_time is None or metrics.finished_time is None:
        return 0.0
    elapsed = metrics.finished_time - metrics.first_token_time
    num_tokens = len(output.outputs[0].token_ids) - 1
    return num_tokens / elapsed if elapsed > 0 else 0.0


def time_to_first_token(output: RequestOutput) -> float:
    """Seconds from arrival to the first token; 0 if there is none."""
    metrics = output.metrics
    return (metrics.first_token_time or metrics.arrival_time) - metrics.arrival_time


def per_position(speculation: SpeculationMetrics) -> str:
    """Acceptance at the first window positions, in per cent."""
    rates = speculation.acceptance_per_position
    shown = " ".join(f"{100 * rate:.0f}" for rate in rates[:_SHOWN_POSITIONS])
    return f"{shown} ..%" if len(rates) > _SHOWN_POSITIONS else f"{shown}%"


def summary(output: RequestOutput, synthetic: Sequence[str] = ()) -> str:
    """One line on a finished request, first what is made up (``EngineConfig.synthetic``)."""
    completion = output.outputs[0]
    made_up = "".join(f"{what.upper()}; " for what in synthetic)
    line = (
        f"[{made_up}{len(output.prompt_token_ids)} prompt tokens, first token after "
        f"{time_to_first_token(output):.2f} s; {len(completion.token_ids)} tokens, "
        f"{tokens_per_second(output):.1f} tokens/s; {completion.finish_reason}"
    )
    speculation = output.metrics.speculation
    if speculation.num_draft_tokens:
        line += (
            f"; acceptance length {speculation.acceptance_length:.2f}, "
            f"per position {per_position(speculation)}"
        )
    return line + "]"


def as_json(output: RequestOutput, synthetic: Sequence[str] = ()) -> dict[str, Any]:
    """A finished request as values that JSON knows; ``synthetic`` as in ``summary``."""
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
    """Every setting, one a line, with the reason where the engine chose."""
    from sametoken.engine.summary import explanation

    settings = explanation(resolved)
    width = max(len(setting.name) for setting in settings)
    return "\n".join(
        f"{setting.name:<{width}}  {setting.value}"
        + (f"  ({setting.reason})" if setting.reason else "")
        for setting in settings
    )


_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def memory_report(memory: Memory) -> str:
    """What is counted, one a line, with what a state per draft position would take instead."""
    request, k = memory.request, memory.request.num_drafts
    lines = {
        "weights": memory.weights,
        "drafter's own weights": memory.draft_weights,
        "KV per token": request.kv_per_token + request.draft_kv_per_token,
        f"KV per block of {memory.block_size} tokens": memory.kv_per_block,
    }
    if request.recurrent_state:
        lines["recurrent state per request"] = request.recurrent_state
    if request.pending:
        lines[f"pending inputs of {k} drafts, per request"] = request.pending
        lines["  (a recurrent state per draft would take)"] = request.state_per_draft
    lines |= {
        f"a request of {memory.max_model_len} tokens": memory.per_request,
        "  of which speculation adds": memory.speculation_per_request,
        f"weights and {memory.max_num_seqs} such requests": memory.total,
    }
    drafts = f"{memory.method}, {k} drafts" if memory.method else "no speculation"
    head = f"{memory.model}, {memory.dtype}, {drafts}: counted, nothing is loaded"
    width = max(map(len, lines))
    return "\n".join([head, *(f"{name:<{width}}  {in_units(n):>9}" for name, n in lines.items())])


def in_units(num_bytes: int) -> str:
    """Bytes in the largest unit that they fill, in powers of 1000."""
    for size, unit in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


_WIDTH = 120


def wide_console() -> Console:
    """As wide as the terminal; where there is none, wide enough for the tables of ``bench``."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    return Console(highlight=False, soft_wrap=True, width=width)
