"""Sampling parameters by slot, constant while a request runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.ops.sampling.logits_rules import Edits, LogitsRules, Truncation
from sametoken.ops.step.types import TableWrite
from sametoken.state.upload import upload
from sametoken.types.plan import Admission

T = TypeVar("T")

#: Lower temperatures are greedy, as in vLLM: dividing by them would overflow fp32.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Sampling parameters of all S = max_num_seqs + 1 slots; the last slot is greedy padding.

    Attributes:
        temperature: [S] fp32, 0 for greedy.
        prompt_temperature: [S] fp32, above 0; see ``EngineRequest``.
        seed: [S] int64.
        top_k: [S] int64, 0 keeps all.
        top_p, min_p: [S] fp64; 1 and 0 keep all.
        rules: masks, biases and penalties of the slots that have any.
        num_logprobs, num_prompt_logprobs: on the host: number of top tokens by slot, only
            where log-probabilities are requested.
    """

    temperature: Tensor
    prompt_temperature: Tensor
    seed: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    rules: LogitsRules
    num_logprobs: dict[int, int] = field(default_factory=dict)
    num_prompt_logprobs: dict[int, int] = field(default_factory=dict)

    @classmethod
    def allocate(cls, max_num_seqs: int, device: torch.device) -> SamplingTable:
        """Greedy slots without options."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((max_num_seqs + 1,), value, dtype=dtype, device=device)

        return cls(
            temperature=full(0, torch.float32),
            prompt_temperature=full(1, torch.float32),
            seed=full(0, torch.int64),
            top_k=full(0, torch.int64),
            top_p=full(1, torch.float64),
            min_p=full(0, torch.float64),
            rules=LogitsRules(
                edits={},
                edit_addresses=full(0, torch.int64),
                counters={},
                counter_of=full(-1, torch.int64),
                repetition=full(1, torch.float32),
                frequency=full(0, torch.float32),
                presence=full(0, torch.float32),
            ),
        )

    @property
    def truncation(self) -> Truncation:
        """Top-k, top-p and min-p parameters; views of the table's tensors."""
        return Truncation(self.temperature, self.top_k, self.top_p, self.min_p)

    def admit(self, admission: Admission) -> list[TableWrite]:
        """What sets a slot's parameters, replacing all of its previous request's.

        Raises:
            InvariantError: the request samples without a resolved seed, or its masks forbid
                every token.
        """
        slot, params = admission.slot, admission.params
        greedy = params.temperature < GREEDY_TEMPERATURE
        if params.seed is None and not greedy:
            raise InvariantError(f"the request of slot {slot} samples but has no seed")
        _replace(self.num_logprobs, slot, params.logprobs)
        _replace(self.num_prompt_logprobs, slot, params.prompt_logprobs)
        return [
            TableWrite(self.temperature[slot], 0.0 if greedy else params.temperature),
            TableWrite(self.prompt_temperature[slot], admission.prompt_temperature),
            TableWrite(self.seed[slot], params.seed or 0),
            TableWrite(self.top_k[slot], params.top_k),
            TableWrite(self.top_p[slot], params.top_p),
            TableWrite(self.min_p[slot], params.min_p),
            _admit_edits(self.rules, admission),
            *_admit_penalties(self.rules, admission),
        ]


def _replace(by_slot: dict[int, T], slot: int, value: T | None) -> None:
    by_slot.pop(slot, None)
    if value is not None:
        by_slot[slot] = value


def _admit_edits(rules: LogitsRules, admission: Admission) -> TableWrite:
    edits = _edits_of(admission)
    row = None if edits is None else upload(edits.pack(), rules.edit_addresses.device)
    # The old row's memory is reused in stream order, after the steps that read it.
    _replace(rules.edits, admission.slot, row)
    return TableWrite(rules.edit_addresses[admission.slot], 0 if row is None else row.data_ptr())


def _edits_of(admission: Admission) -> Edits | None:
    """A request's masks and biases; None if it has none."""
    params, words = admission.params, admission.bad_words_token_ids
    min_tokens = params.min_tokens if admission.stop_token_ids else 0
    if params.allowed_token_ids is None and not (params.logit_bias or words or min_tokens):
        return None
    allowed = params.allowed_token_ids
    return Edits(
        allowed_ids=None if allowed is None else frozenset(allowed),
        banned_ids=frozenset(word[0] for word in words if len(word) == 1),
        stop_ids=frozenset(admission.stop_token_ids if min_tokens else ()),
        min_tokens=min_tokens,
        bad_words=tuple(word for word in words if len(word) > 1),
        biases=dict(params.logit_bias or {}),
    )


def _admit_penalties(rules: LogitsRules, admission: Admission) -> list[TableWrite]:
    slot, params = admission.slot, admission.params
    rules.counters.pop(slot, None)
    if params.has_penalties:
        used = set(rules.counters.values())
        rules.counters[slot] = next(number for number in count() if number not in used)
    return [
        TableWrite(rules.counter_of[slot], rules.counters.get(slot, -1)),
        TableWrite(rules.repetition[slot], params.repetition_penalty),
        TableWrite(rules.frequency[slot], params.frequency_penalty),
        TableWrite(rules.presence[slot], params.presence_penalty),
    ]
