"""Sends prompts that begin alike to the replica whose prefix cache holds their beginning."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import LocalityMixin, RequestRouter

from sametoken.server.ray.prefixes import Homes

_CAPACITY = 2**17


class PrefixRouter(LocalityMixin, RequestRouter):  # type: ignore[misc]
    """A request router of Ray Serve.

    A request goes where the longest prefix of its prompt went before, unless that replica has
    more than ``max_lead`` requests above the least busy one; else to the least busy one. Its
    first argument is a ``Forwarded``.
    """

    def initialize_state(self, max_lead: int = 8) -> None:
        """See ``RequestRouter``: called with the deployment's options for its router."""
        self._max_lead = max_lead
        self._homes: Homes[Any] = Homes(_CAPACITY)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any
    ) -> list[list[Any]]:
        """See ``RequestRouter``: ranks of replicas; of a rank the least busy one is taken."""
        # All replicas are candidates at once: there is no wider choice to hurry to.
        pending_request.routing_context.should_backoff = True
        forwarded = pending_request.args[0]
        able = {
            replica.replica_id: replica
            for replica in candidate_replicas
            if replica.replica_id.unique_id not in forwarded.avoided
        }
        home = self._homes.find(forwarded.keys, set(able))
        if home is not None and not self._is_busy(home, list(able)):
            return [[able[home]], candidate_replicas]
        return [list(able.values()), candidate_replicas]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """See ``RequestRouter``."""
        self._homes.note(pending_request.args[0].keys, replica_id)

    def _is_busy(self, home: Any, replica_ids: list[Any]) -> bool:
        lengths = {one: self.replica_queue_len_cache.get(one) or 0 for one in replica_ids}
        return bool(lengths[home] - min(lengths.values()) > self._max_lead)
