"""Imported by verl itself, by the entry point ``verl.plugins``: registers the rollout's name."""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

NAME = "sametoken"


def _replica() -> type[RolloutReplica]:
    from sametoken.serving.verl.replica import Replica

    return Replica


_ROLLOUT_REGISTRY[NAME, "async"] = "sametoken.serving.verl.rollout.ServerAdapter"
RolloutReplicaRegistry.register(NAME, _replica)
