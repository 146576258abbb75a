"""``StepOps`` on a GPU, with static shapes."""

from sametoken.ops.step.reference import known_drafts
from sametoken.ops.step.triton_commit import commit, publish, verify
from sametoken.ops.step.triton_drafts import advanced, catch_up, stacked
from sametoken.ops.step.triton_inputs import deliver, fetch, prepare_inputs
from sametoken.ops.step.triton_tables import write_tables

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
    "write_tables",
]
