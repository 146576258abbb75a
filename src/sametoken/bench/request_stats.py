"""Speculation statistics that a server adds to an answer: ours, and vLLM's under our names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sametoken.bench.measure import Window

_PER_STEP = {"per_step_drafted", "per_step_accepted"}
#: What a float holds exactly, so that sums and rates of any server's counts can be computed.
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Rate = Annotated[float, Field(ge=0, le=1)]


def speculation_in(event: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Window, ...]] | None:
    """The statistics in an event, and the verify steps if the server reports them.

    None without statistics; those of an unknown form are ignored, as the answer beside them is
    still one.
    """
    with contextlib.suppress(ValueError):
        if "speculation" in event:
            ours = _Ours.model_validate(event["speculation"])
            # The first entry is the last prefill step.
            return ours.model_dump(exclude=_PER_STEP), ours.windows(skipped=1)
    with contextlib.suppress(ValueError):
        if "metrics" in event:
            theirs = _Metrics.model_validate(event["metrics"]).speculative_decoding
            return theirs.under_our_names(), theirs.windows()
    return None


class _Stats(BaseModel):
    """Of every step, the drafts that were offered and accepted, if the server reports them."""

    model_config = ConfigDict(strict=True)

    per_step_drafted: list[_Count] | None = None
    per_step_accepted: list[_Count] | None = None

    def windows(self, skipped: int = 0) -> tuple[Window, ...]:
        """Windows after the prefill's token; none without steps.

        Raises:
            ValueError: the lists have different lengths.
        """
        columns = (self.per_step_drafted or (), self.per_step_accepted or ())
        steps = list(zip(*columns, strict=True))[skipped:]
        if not steps:
            return ()
        windows, first = [Window(0, 0, 0)], 1
        for drafted, accepted in steps:
            windows.append(Window(first, drafted, accepted))
            first += accepted + 1
        return tuple(windows)


class _Ours(_Stats):
    num_steps: _Count
    num_draft_tokens: _Count
    num_accepted_tokens: _Count
    acceptance_length: float
    acceptance_rate: float
    acceptance_per_position: list[_Rate]
    offered_per_position: list[_Count]

    @model_validator(mode="after")
    def _require_pairs(self) -> Self:
        if len(self.acceptance_per_position) != len(self.offered_per_position):
            raise ValueError("the lists have different lengths")
        return self


class _Theirs(_Stats):
    num_spec_steps: _Count
    num_draft_tokens: _Count
    num_accepted_draft_tokens: _Count
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[_Count]

    def under_our_names(self) -> dict[str, Any]:
        rates = _per_position(self.acceptance_histogram)
        return {
            "num_steps": self.num_spec_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_draft_tokens,
            "acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.draft_acceptance_rate,
            "acceptance_per_position": rates,
            # They are shares of all steps.
            "offered_per_position": [self.num_spec_steps] * len(rates),
        }


class _Metrics(BaseModel):
    speculative_decoding: _Theirs


def _per_position(histogram: list[int]) -> list[float]:
    """Convert a histogram of accepted drafts to the share of steps that accepted draft i >= 1."""
    steps = sum(histogram)
    return [sum(histogram[i:]) / steps if steps else 0.0 for i in range(1, len(histogram))]
