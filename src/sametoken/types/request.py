"""A request as the scheduler and the device see it: token ids, no text."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from sametoken.types.outputs import PositionLogprobs
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import (
    Grammar,
    MaskFault,
)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One completion to produce; ``n`` > 1 is fanned out before.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_token_ids: at least one token.
        params: sampling parameters with ``seed`` resolved to a number.
        max_total_tokens: prompt and output together never exceed this.
        stop_token_ids: EOS and stop ids, masked until ``min_tokens`` are out.
        bad_words_token_ids: token sequences that may not be completed.
        grammar: what ``params.structured_outputs`` compiles to.
        num_speculative_tokens: this request's own limit on drafts per step; None means k.
        use_prefix_cache: whether it takes cached blocks, and leaves its own to others.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    num_speculative_tokens: int | None = None
    use_prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.params.logit_bias is None:
            return
        # Of its own: what was checked may be changed by its owner before it is admitted.
        params = copy.copy(self.params)
        object.__setattr__(params, "logit_bias", dict(self.params.logit_bias))
        object.__setattr__(self, "params", params)


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one settled step brought to one request.

    Attributes:
        token_ids: emitted tokens, not yet cut at a stop or at the length limit.
        num_drafts, num_accepted: of this step's window.
        samples: whether the step reached the end of the prompt and so emitted tokens.
        num_cached: prompt positions that the prefix cache supplied.
        failed: the row cannot be judged; ``token_ids`` is empty and the request is released.
        mask_fault: why no token was allowed, if that is why it is failed, not a NaN.
        logprobs: one entry per token of ``token_ids``, if asked for.
        prompt_logprobs: entries of prompt positions, in order, if asked for; the first
            prompt token has none.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_drafts: int
    num_accepted: int
    samples: bool
    num_cached: int
    failed: bool = False
    mask_fault: MaskFault = MaskFault.NONE
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
