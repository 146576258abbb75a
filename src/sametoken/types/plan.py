"""The plan of one step: what the host wants the device to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import Grammar


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets a slot.

    Attributes:
        slot: the request's index on the device until it ends.
        prompt_token_ids: the whole prompt.
        num_cached: leading positions whose KV the prefix cache already holds.
        params: sampling parameters with ``seed`` resolved to a number.
        stop_token_ids: EOS and stop ids; masked until ``min_tokens`` is reached.
        bad_words_token_ids: token sequences that must not be completed.
        grammar: constrains the output.
        request_id: the owner of the slot, for host code that reads plans.
        prompt_temperature, adapter: as in ``EngineRequest``.
    """

    slot: int
    prompt_token_ids: tuple[int, ...]
    num_cached: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    request_id: str = ""
    prompt_temperature: float = 1.0
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class BlockAssignment:
    """KV blocks to append to a slot's block table, from table index ``first_index`` on."""

    slot: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy KV blocks to host blocks: of a preempted request's slot, or of an idle prefix."""

    slot: int | None
    block_ids: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy host blocks into a slot's new KV blocks."""

    slot: int
    block_ids: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy between a slot's recurrent memory and a kept state.

    Attributes:
        slot: the slot.
        position: the number of positions that the kept state stands for.
        state: index of the kept state.
    """

    slot: int
    position: int
    state: int


class ScheduledRequest(NamedTuple):
    """The rows of one slot in a step.

    Attributes:
        slot: the slot.
        num_query: committed tokens to compute: a prefill chunk's length, 1 when decoding.
        draft_limit: maximum drafts in the window, 0..k.
        samples: whether the rows include the last committed token, so that a token is sampled.
        replays: whether they were computed before and their KV is lost; nothing else is wanted.
        expanded_to: positions that the last row of a chunk of expanded latents sees; 0: no such.
    """

    slot: int
    num_query: int
    draft_limit: int
    samples: bool
    replays: bool = False
    expanded_to: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, applied on the device in the order of the fields.

    ``restarts`` are slots of preempted requests whose KV is lost: no position is computed. In
    ``requests``, windows (one committed token, sampled) come before prompt chunks, expanded last
    (tests/unit/scheduler/test_plan_draft.py). ``restored_states`` are copied into slots,
    ``kept_states`` out of them; of the latter those whose slot has passed their position.
    ``num_wanted``: the drafts that a model or head makes for each next window, 0..k; None: k.
    """

    step_id: int
    swap_outs: tuple[SwapOut, ...] = ()
    restarts: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    block_assignments: tuple[BlockAssignment, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    restored_states: tuple[StateCopy, ...] = ()
    requests: tuple[ScheduledRequest, ...] = ()
    kept_states: tuple[StateCopy, ...] = ()
    num_wanted: int | None = None
