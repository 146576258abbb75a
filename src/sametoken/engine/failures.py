"""Why the engine failed a request, as an error."""

from __future__ import annotations

from sametoken.errors import NumericalError, SametokenError, StructuredOutputError
from sametoken.types.request import RequestUpdate
from sametoken.types.structured_outputs import MASK_CREDIT_S, MASK_SECONDS, MaskFault


def failure_of(update: RequestUpdate) -> SametokenError:
    """The error of a failed request."""
    if update.mask_fault in _MASK_FAULTS:
        return StructuredOutputError(*_MASK_FAULTS[update.mask_fault])
    return NumericalError(
        "the model's logits were NaN", "check the checkpoint, or use dtype float32"
    )


#: Cause and remedy.
_MASK_FAULTS = {
    MaskFault.NO_VALID_TOKEN: (
        "no token satisfies structured_outputs or thinking_token_budget and the other parameters",
        "loosen the grammar, or drop min_tokens, bad_words or allowed_token_ids",
    ),
    MaskFault.SLOW: (
        "the masks of the structured_outputs grammar took longer than "
        f"{MASK_CREDIT_S} s and {MASK_SECONDS * 1000:.0f} ms a token",
        "make the grammar less ambiguous: give each text one way to match",
    ),
    MaskFault.BROKEN: (
        "the grammar library failed on the grammar of structured_outputs",
        "this is a defect; report the grammar, and write it another way",
    ),
}
