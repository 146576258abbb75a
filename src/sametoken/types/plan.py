"""What the host asks of the device in one step: the only upload of a step."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import Grammar


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a slot.

    Attributes:
        slot: the request's row on the device, for the request's life.
        prompt_token_ids: the whole prompt.
        num_cached: leading positions whose KV the prefix cache already holds.
        params: sampling parameters with ``seed`` resolved to a number.
        stop_token_ids: EOS and stop ids; masked while ``min_tokens`` is not reached.
        bad_words_token_ids: token sequences that may not be completed.
        grammar: what the output must match.
        request_id: whose slot it is, for whoever follows plans on the host.
    """

    slot: int
    prompt_token_ids: tuple[int, ...]
    num_cached: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class BlockAssignment:
    """KV blocks that a slot's block table gains, from table index ``first_index`` on."""

    slot: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy a slot's KV blocks to host memory under ``key``; the blocks are then free."""

    slot: int
    block_ids: tuple[int, ...]
    key: str


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy the KV saved under ``key`` back into the slot's new blocks."""

    slot: int
    block_ids: tuple[int, ...]
    key: str


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One slot's part in a step.

    Attributes:
        slot: the slot.
        num_query: committed tokens to compute: a prefill chunk's length, 1 when decoding.
        draft_limit: at most so many drafts join the window, 0..k.
        samples: whether the row reaches the last committed token and so samples.
    """

    slot: int
    num_query: int
    draft_limit: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, applied on the device in the order of the fields.

    ``discarded_swaps`` are keys whose saved KV will never be read again (aborts). Of ``rows``
    those with one committed token that sample come first, windows to the device; the others are
    chunks of prompts (tests/unit/scheduler/test_plan_draft.py).
    """

    step_id: int
    swap_outs: tuple[SwapOut, ...] = ()
    discarded_swaps: tuple[str, ...] = ()
    admissions: tuple[Admission, ...] = ()
    block_assignments: tuple[BlockAssignment, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    requests: tuple[ScheduledRequest, ...] = ()
