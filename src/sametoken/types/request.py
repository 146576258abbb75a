"""Requests to the engine core and their updates: token ids, no text."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sametoken.types.outputs import PositionLogprobs
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import Grammar, MaskFault

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One completion to generate; ``n`` > 1 is fanned out before.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_token_ids: at least one token.
        params: sampling parameters with ``seed`` resolved to a number.
        max_total_tokens: maximum length of prompt and output together.
        stop_token_ids: EOS and stop ids, masked until ``min_tokens`` is reached.
        bad_words_token_ids: token sequences that must not be completed.
        grammar: the compiled ``params.structured_outputs``.
        num_speculative_tokens: limit on drafts per step for this request; None means k.
        use_prefix_cache: whether it reads cached blocks and caches its own.
        prompt_temperature: above 0; log-probabilities of the prompt are of softmax(logits / this).
        lora_name: of its LoRA adapter; None: it has none.
        adapter: the number that ``lora_name`` has as the engine takes the request; 0: none.
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
    prompt_temperature: float = 1.0
    lora_name: str | None = None
    adapter: int = 0

    def __post_init__(self) -> None:
        if self.params.logit_bias is None:
            return
        # A copy: the caller may change the mapping between this check and admission.
        params = copy.copy(self.params)
        object.__setattr__(params, "logit_bias", dict(self.params.logit_bias))
        object.__setattr__(self, "params", params)


class RequestUpdate(NamedTuple):
    """The processed output of one step for one request.

    Attributes:
        token_ids: emitted tokens, not yet cut at a stop or at the length limit.
        num_drafts, num_accepted: counts of this step's window.
        samples: whether the step reached the end of the prompt and emitted tokens.
        num_cached: prompt positions that the prefix cache supplied.
        weight_versions: of the weights of the request's first step, and of this one.
        logprobs: one entry per token of ``token_ids``, if requested.
        prompt_logprobs: entries of prompt positions in order, if requested; the first
            prompt token has none.
        routed_experts: as in ``RequestResult``.
        failed: NaN logits or no valid token; ``token_ids`` is empty, the request is released.
        mask_fault: why no token was valid; NONE if NaN logits are the cause.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_drafts: int
    num_accepted: int
    samples: bool
    num_cached: int
    weight_versions: tuple[int, int] = (0, 0)
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    routed_experts: np.ndarray[Any, Any] | None = None
    failed: bool = False
    mask_fault: MaskFault = MaskFault.NONE
