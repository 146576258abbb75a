"""The operations of a step on a GPU: a module that is ``ops.StepOps``."""

from sametoken.kernels.step.reference import known_drafts
from sametoken.kernels.step.triton_commit import commit, publish, verify
from sametoken.kernels.step.triton_drafts import advanced, catch_up, stacked
from sametoken.kernels.step.triton_inputs import prepare_inputs
from sametoken.kernels.step.triton_transfer import deliver, fetch

__all__ = [
    "advanced",
    "catch_up",
    "commit",
    "deliver",
    "fetch",
    "known_drafts",
    "prepare_inputs",
    "publish",
    "stacked",
    "verify",
]
