"""Limits of the scheduler's plans, and the check that a request fits them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sametoken.errors import ConfigError, RequestError
from sametoken.scheduler.draft_limits import StepReads
from sametoken.types.fast_prompts import NO_FAST_FORM, FastForm
from sametoken.types.layout import StepShape
from sametoken.types.request import EngineRequest

_AT_LEAST_ONE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "longest_chunk",
    "block_size",
    "num_blocks",
    "busy_rows",
    "usual_rows",
)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of every plan, resolved once at start-up.

    Attributes:
        max_num_seqs: slots: maximum requests on the device.
        max_num_batched_tokens: maximum rows per step, drafts included.
        longest_chunk: maximum tokens of one prompt per step.
        block_size: tokens per KV block.
        num_blocks: KV blocks, ids ``0 .. num_blocks - 1``.
        num_host_blocks: blocks of host memory for KV that leaves the device.
        num_idle_host_blocks: how many of these idle prefixes may have.
        max_model_len: maximum length of prompt and output together, in tokens.
        num_speculative_tokens: k; 0 is plain decoding.
        adaptive_drafts: whether draft limits follow load and acceptance, or are always k.
        reads: what a step reads whatever its rows.
        busy_rows: rows of prompts from which a step gains little time a row by more.
        usual_rows: maximum rows per step, unless crowds of prompts wait or of requests decode.
        lookahead_slots: positions from ``num_tokens`` on that the drafter writes KV to.
        lookahead_tokens: tokens after a position that the drafter's KV there depends on.
        sliding_window: positions that a row sees at most, in every layer; 0: some rows see all.
        enable_prefix_caching: share KV of equal blocks of tokens.
        cache_emitted_blocks: share KV of emitted tokens too; requires a model whose prefill,
            decode and verify rows have equal bits, and a drafter without recurrent layers.
        num_kept_states: recurrent states that can be kept; 0 if the model has no recurrent
            layers or prefix caching is off.
        captured_shapes: a step that the first of them holds is padded to it.
        fast_form: in which long prompts begin.

    Raises:
        ConfigError: a value is impossible.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    longest_chunk: int
    block_size: int
    num_blocks: int
    num_host_blocks: int
    num_idle_host_blocks: int
    max_model_len: int
    num_speculative_tokens: int
    adaptive_drafts: bool
    reads: StepReads
    busy_rows: int
    usual_rows: int
    lookahead_slots: int
    lookahead_tokens: int
    sliding_window: int
    enable_prefix_caching: bool
    cache_emitted_blocks: bool
    num_kept_states: int
    captured_shapes: tuple[StepShape, ...] = ()
    fast_form: FastForm = NO_FAST_FORM

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low = _lowest(field.name)
            if isinstance(value, int) and value < low:
                raise ConfigError(f"{field.name}={value} is not possible", f"use {low} or more")

    def require_possible(self, request: EngineRequest) -> None:
        """Refuse a request that could not finish even if it ran alone.

        Raises:
            RequestError: its prompt is empty or too long, or its length limit does not fit.
        """
        name, total = f"request {request.request_id!r}", request.max_total_tokens
        prompt_len = len(request.prompt_token_ids)
        if not prompt_len:
            raise RequestError(f"{name} has an empty prompt", "give at least one token")
        if prompt_len > self.max_model_len - 1:
            raise RequestError(
                f"{name} has a prompt of {prompt_len} tokens but max_model_len="
                f"{self.max_model_len} leaves room for {self.max_model_len - 1}",
                "shorten the prompt or raise max_model_len",
            )
        if not prompt_len < total <= self.max_model_len:
            raise RequestError(
                f"{name} has max_total_tokens={total}",
                f"use a number from {prompt_len + 1} (the prompt and one token) "
                f"to {self.max_model_len} (max_model_len)",
            )
        needed = self.blocks_for(total + self.lookahead_slots)
        if needed > self.num_blocks:
            raise RequestError(
                f"{name} may need {needed} KV blocks for {total} tokens but there are "
                f"{self.num_blocks}",
                "lower max_tokens or give the KV cache more memory",
            )

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that hold positions ``0 .. num_positions - 1``."""
        return -(-num_positions // self.block_size)


def _lowest(name: str) -> int:
    if name == "max_model_len":
        return 2  # one prompt token and one output token
    return 1 if name in _AT_LEAST_ONE else 0
