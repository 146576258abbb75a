"""Counted memory as lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sametoken.bench.memory import Memory

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
