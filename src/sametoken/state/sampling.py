"""Sampling parameters by slot. Constant while a request runs: nothing here counts tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sametoken.core.plan import Admission
from sametoken.errors import InvariantError
from sametoken.kernels.interface import Cuts

#: Below this a temperature is greedy, as in vLLM: dividing by it would overflow fp32.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SlotRules:
    """What changes a request's logits by token id or by history. Few requests have any.

    Attributes:
        allowed_ids: [A] int64 ascending, the only ids that may be chosen; None for all.
        banned_ids: [X] int64, bad words of one token.
        bad_words: bad words of two tokens and more.
        min_tokens: output tokens before which ``stop_ids`` are masked.
        stop_ids: [E] int64.
        bias_ids, bias: [Y] int64 and fp32, added to the logits.
        repetition_penalty, frequency_penalty, presence_penalty: as vLLM defines them.
    """

    allowed_ids: Tensor | None
    banned_ids: Tensor
    bad_words: tuple[tuple[int, ...], ...]
    min_tokens: int
    stop_ids: Tensor
    bias_ids: Tensor
    bias: Tensor
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float

    @classmethod
    def of(cls, admission: Admission, device: torch.device) -> SlotRules | None:
        """The rules of a request, or None if it has none."""
        params = admission.params
        min_tokens = params.min_tokens if admission.stop_token_ids else 0
        plain = params.allowed_token_ids is None and not params.logit_bias
        if plain and not (params.has_penalties or admission.bad_words_token_ids or min_tokens):
            return None

        def ids(values: set[int]) -> Tensor:
            return torch.tensor(sorted(values), dtype=torch.int64, device=device)

        words = admission.bad_words_token_ids
        bias = dict(params.logit_bias or {})
        allowed = params.allowed_token_ids
        return cls(
            allowed_ids=None if allowed is None else ids(set(allowed)),
            banned_ids=ids({word[0] for word in words if len(word) == 1}),
            bad_words=tuple(word for word in words if len(word) > 1),
            min_tokens=min_tokens,
            stop_ids=ids(set(admission.stop_token_ids)),
            bias_ids=torch.tensor(list(bias), dtype=torch.int64, device=device),
            bias=torch.tensor(list(bias.values()), dtype=torch.float32, device=device),
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
        )

    @property
    def has_masks(self) -> bool:
        """Whether tokens may be forbidden."""
        return (
            self.allowed_ids is not None
            or self.banned_ids.numel() > 0
            or bool(self.bad_words)
            or self.min_tokens > 0
        )

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Sampling parameters of all S = max_num_seqs + 1 slots; the last slot is greedy padding.

    Attributes:
        temperature: [S] fp32, 0 for greedy.
        seed: [S] int64.
        top_k: [S] int64, 0 keeps all.
        top_p, min_p: [S] fp64; 1 and 0 keep all.
        num_logprobs, num_prompt_logprobs: [S] int64, candidates asked for; -1 for none at all.
        rules: by slot, for the slots that have any.
    """

    temperature: Tensor
    seed: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    num_logprobs: Tensor
    num_prompt_logprobs: Tensor
    rules: dict[int, SlotRules] = field(default_factory=dict)

    @classmethod
    def allocate(cls, max_num_seqs: int, device: torch.device) -> SamplingTable:
        """Slots that are greedy and ask for nothing."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((max_num_seqs + 1,), value, dtype=dtype, device=device)

        return cls(
            temperature=full(0, torch.float32),
            seed=full(0, torch.int64),
            top_k=full(0, torch.int64),
            top_p=full(1, torch.float64),
            min_p=full(0, torch.float64),
            num_logprobs=full(-1, torch.int64),
            num_prompt_logprobs=full(-1, torch.int64),
        )

    @property
    def cuts(self) -> Cuts:
        """What says which tokens are too unlikely; the table's own tensors."""
        return Cuts(self.temperature, self.top_k, self.top_p, self.min_p)

    def admit(self, admission: Admission) -> None:
        """Take up a request's parameters, replacing everything of the slot's former one.

        Raises:
            InvariantError: the request samples but its seed was not resolved.
        """
        slot, params = admission.slot, admission.params
        greedy = params.temperature < GREEDY_TEMPERATURE
        if params.seed is None and not greedy:
            raise InvariantError(f"the request of slot {slot} samples but has no seed")
        self.temperature[slot].fill_(0.0 if greedy else params.temperature)
        self.seed[slot].fill_(params.seed or 0)
        self.top_k[slot].fill_(params.top_k)
        self.top_p[slot].fill_(params.top_p)
        self.min_p[slot].fill_(params.min_p)
        self.num_logprobs[slot].fill_(_or_none_at_all(params.logprobs))
        self.num_prompt_logprobs[slot].fill_(_or_none_at_all(params.prompt_logprobs))
        self.rules.pop(slot, None)
        rules = SlotRules.of(admission, self.temperature.device)
        if rules is not None:
            self.rules[slot] = rules


def _or_none_at_all(count: int | None) -> int:
    return -1 if count is None else count
