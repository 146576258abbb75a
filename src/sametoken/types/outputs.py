"""Results of a step on the host, and the outputs that a user receives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from sametoken.types.growing import Beginning
from sametoken.types.structured_outputs import MaskFault

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token: natural-log probability and rank (1 is the most likely)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


#: Candidates of one position by token id: the sampled token and the top ones.
PositionLogprobs = dict[int, Logprob]


class RequestResult(NamedTuple):
    """The verified result of one scheduled request, read after its copy has completed.

    Attributes:
        num_drafts: drafts really offered, 0..draft_limit.
        num_proposed: drafts that the drafter had proposed, before any limit.
        num_accepted: accepted drafts, 0..num_drafts; the bonus token is not counted.
        token_ids: accepted drafts and the next token; empty if the request does not sample.
        failed: NaN logits or no valid token; tokens and counts are meaningless.
        mask_fault: why no token was valid; NONE if NaN logits are the cause.
        logprobs: one entry per token of ``token_ids``, if requested.
        prompt_logprobs: entries for prompt positions ``first + 1 ..`` of this chunk, where
            ``first`` is the chunk's first position, if requested.
        routed_experts: [rows, layers, top_k], of the positions that the step has committed, if
            they are recorded.
    """

    num_drafts: int
    num_proposed: int
    num_accepted: int
    token_ids: tuple[int, ...]
    failed: bool = False
    mask_fault: MaskFault = MaskFault.NONE
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    routed_experts: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one step in the order of ``StepPlan.requests``; steps arrive in order."""

    step_id: int
    requests: tuple[RequestResult, ...]


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """Speculation counters of one request or of a run.

    Attributes:
        num_steps: steps that sampled.
        num_draft_tokens: drafts offered.
        num_accepted_tokens: drafts accepted; bonus tokens are not counted.
        offered_per_position: steps with a draft at window position i (from 1).
        accepted_per_position: steps that accepted that draft.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    offered_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per step, including the bonus token."""
        return 1 + self.num_accepted_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over offered drafts."""
        if not self.num_draft_tokens:
            return 0.0
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Accepted over offered at each window position."""
        pairs = zip(self.accepted_per_position, self.offered_per_position, strict=True)
        return tuple(a / o if o else 0.0 for a, o in pairs)

    @classmethod
    def of(cls, windows: Iterable[tuple[int, int]]) -> SpeculationMetrics:
        """Of the drafts and accepted drafts of steps."""
        counts = SpeculationCounts()
        for num_drafts, num_accepted in windows:
            counts.add(num_drafts, num_accepted)
        return counts.metrics()

    def __add__(self, other: SpeculationMetrics) -> SpeculationMetrics:
        return SpeculationMetrics(
            self.num_steps + other.num_steps,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            _summed(self.offered_per_position, other.offered_per_position),
            _summed(self.accepted_per_position, other.accepted_per_position),
        )


def _summed(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


@dataclass(slots=True)
class SpeculationCounts:
    """``SpeculationMetrics`` that grow step by step."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count one more sampling step."""
        self.num_steps += 1
        if not num_drafts:
            return
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        new = [0] * (num_drafts - len(self.offered))
        self.offered += new
        self.accepted += new
        for index in range(num_drafts):
            self.offered[index] += 1
            self.accepted[index] += index < num_accepted

    def metrics(self) -> SpeculationMetrics:
        """The counters by now."""
        return SpeculationMetrics(
            self.num_steps,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            tuple(self.offered),
            tuple(self.accepted),
        )


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Of one request: times in seconds of a monotonic clock, and counts.

    ``num_cached_tokens`` are prompt tokens whose KV the prefix cache supplied,
    ``first_scheduled_time`` is that of the first step.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    first_scheduled_time: float | None = None


class _MadeOnRead:
    """Makes the text, the tokens and the log-probabilities of a ``Beginning`` once they are read.

    Their slots stay empty until then. ``_beginning`` is None in an output that was made of whole
    values, as by a user or by ``pickle``.
    """

    __slots__ = ("_beginning",)

    _beginning: Beginning | None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The value of an empty slot."""
            if name == "_beginning":
                return None
            if name not in _OF_BEGINNING or self._beginning is None:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            value = getattr(self._beginning, name)()
            object.__setattr__(self, name, value)
            return value


_OF_BEGINNING = frozenset({"text", "token_ids", "logprobs"})


@dataclass(frozen=True, slots=True)
class CompletionOutput(_MadeOnRead):
    """One completion of a request.

    A stream's outputs are cumulative. To read only what is new, use ``num_characters`` and
    ``num_tokens`` with ``text_from``, ``token_ids_from`` and ``logprobs_from``, which cost only
    what they return.

    ``finish_reason`` is ``"stop"``, ``"length"``, ``"abort"``, ``"error"`` or None while
    running; ``stop_reason`` is the stop string or stop token id that ended it, if any.
    Once finished, ``windows`` holds (``num_drafts``, ``num_accepted``) of every step that
    sampled; equality and ``repr`` ignore it.

    With ``enable_return_routed_experts``, once finished, ``routed_experts`` has the ids of the
    experts that computed all tokens except the last, which was not computed: [tokens of prompt
    and output - 1, layers, top_k], uint8, or uint16 for more than 256 experts; 0 in layers
    without experts; None after an error. Equality ignores it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    error: Exception | None = None
    windows: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)
    routed_experts: np.ndarray[Any, Any] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, beginning: Beginning, index: int, **fields: Any) -> CompletionOutput:
        """The output of a beginning, with the other fields given."""
        output = cls(index, "", (), **fields)
        for name in _OF_BEGINNING:
            object.__delattr__(output, name)
        object.__setattr__(output, "_beginning", beginning)
        return output

    @property
    def num_characters(self) -> int:
        """The length of the text."""
        return len(self.text) if self._beginning is None else self._beginning.num_characters

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self.token_ids) if self._beginning is None else self._beginning.num_tokens

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities were requested."""
        return self.logprobs_from(self.num_tokens) is not None

    def text_from(self, start: int) -> str:
        """The text from a character on."""
        return self.text[start:] if self._beginning is None else self._beginning.text(start)

    def pieces_from(self, first_token: int, start: int) -> list[str]:
        """The text from ``start`` on, parted by the tokens from ``first_token`` on, if known.

        Returns:
            One piece at least.
        """
        if self._beginning is None:
            return [self.text[start:]]
        return self._beginning.pieces(first_token, start)

    def starts_from(self, first_token: int) -> list[int]:
        """Where the text of each token from ``first_token`` on begins.

        A stop string may begin before, at which the text ends. Where the text is not parted by
        tokens, all of it is that of the first one.
        """
        if self._beginning is not None:
            return self._beginning.starts(first_token)
        return [0, *[len(self.text)] * (len(self.token_ids) - 1)][first_token : len(self.token_ids)]

    def token_ids_from(self, start: int) -> tuple[int, ...]:
        """The tokens from ``start`` on."""
        if self._beginning is None:
            return self.token_ids[start:]
        return self._beginning.token_ids(start)

    def logprobs_from(self, start: int) -> tuple[PositionLogprobs, ...] | None:
        """The log-probabilities of ``token_ids_from(start)``, if they were requested."""
        if self._beginning is None:
            return None if self.logprobs is None else self.logprobs[start:]
        return self._beginning.logprobs(start)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All completions of one request.

    ``prompt_logprobs`` covers the whole prompt. It is None if the request failed or was aborted
    during prefill, so that the output does not depend on chunk borders.

    ``weight_versions`` are those of the weights that computed its oldest KV and its newest token;
    they differ if the weights changed meanwhile. None before its first result.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    weight_versions: tuple[int, int] | None = None
