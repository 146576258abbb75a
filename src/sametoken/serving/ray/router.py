"""Prefix-aware routing: requests go to the replica whose prefix cache holds their prompt's prefix.

Prefixes are compared by hashes of the request's text, without a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

from ray.serve.request_router import LocalityMixin, RequestRouter

from sametoken.serving.http.body import read_json

_CAPACITY = 2**17


class PrefixRouter(LocalityMixin, RequestRouter):  # type: ignore[misc]
    """A request router of Ray Serve; requests have a ``Forwarded`` as their first argument.

    A request goes to the replica that last received the longest prefix of its prompt. If that
    replica has more than ``max_lead`` requests above the least busy one, or there is none, the
    request goes to the least busy replica.
    """

    def initialize_state(self, max_lead: int = 8) -> None:
        """See ``RequestRouter``: called with the deployment's ``request_router_kwargs``."""
        self._max_lead = max_lead
        self._prefixes: PrefixMap[Any] = PrefixMap(_CAPACITY)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any
    ) -> list[list[Any]]:
        """See ``RequestRouter``: ranked groups of replicas; Ray picks a group's least busy one."""
        # All replicas are candidates: back off instead of retrying with a wider choice.
        pending_request.routing_context.should_backoff = True
        forwarded = pending_request.args[0]
        available = {
            replica.replica_id: replica
            for replica in candidate_replicas
            if replica.replica_id.unique_id not in forwarded.avoided
        }
        chosen = self._prefixes.find(forwarded.keys, set(available))
        if chosen is not None and not self._is_busy(chosen, list(available)):
            return [[available[chosen]], candidate_replicas]
        return [list(available.values()), candidate_replicas]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """See ``RequestRouter``."""
        self._prefixes.note(pending_request.args[0].keys, replica_id)

    def _is_busy(self, chosen: Any, replica_ids: list[Any]) -> bool:
        lengths = {one: self.replica_queue_len_cache.get(one) or 0 for one in replica_ids}
        return bool(lengths[chosen] - min(lengths.values()) > self._max_lead)


#: Characters of one key's block: about 128 tokens of English.
BLOCK_CHARS = 512
#: Only the first blocks of longer prompts have keys.
MAX_KEYS = 256

ReplicaId = TypeVar("ReplicaId", bound=Hashable)


def prefix_keys(body: bytes) -> tuple[int, ...]:
    """Rolling hashes of a request's prompt, one per block of characters, each of its whole prefix.

    The first i keys of two requests for one model are equal if their first i blocks are, whatever
    the chat template: adapters share no KV. An invalid body has no keys; the replica answers it
    with an error.
    """
    try:
        request = read_json(body)
    except ValueError:
        return ()
    if not isinstance(request, dict):
        return ()
    text = _text(request)
    model = json.dumps(request.get("model"))
    digest, keys = hashlib.blake2b(model.encode(), digest_size=8), []
    for end in range(BLOCK_CHARS, min(len(text), BLOCK_CHARS * MAX_KEYS) + 1, BLOCK_CHARS):
        digest.update(text[end - BLOCK_CHARS : end].encode("utf-8", "surrogatepass"))
        keys.append(int.from_bytes(digest.copy().digest()))
    return tuple(keys)


def _text(request: dict[str, Any]) -> str:
    """The prompt as one text; later messages and items of a conversation extend it."""
    messages = request.get("messages", request.get("input"))
    begin = [request.get(name) for name in ("tools", "instructions", "system")]
    before = json.dumps(begin, sort_keys=True)
    if isinstance(messages, list):
        return before + "".join(json.dumps(message, sort_keys=True) for message in messages)
    if isinstance(messages, str):
        return before + messages
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


class PrefixMap(Generic[ReplicaId]):
    """An LRU map of prefix keys to the replicas that last received them.

    Args:
        capacity: number of keys.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._replicas: OrderedDict[int, ReplicaId] = OrderedDict()

    def find(self, keys: Sequence[int], present: set[ReplicaId]) -> ReplicaId | None:
        """The present replica that received the longest of these prefixes, if any."""
        for key in reversed(keys):
            replica = self._replicas.get(key)
            if replica in present:
                return replica
        return None

    def note(self, keys: Sequence[int], replica: ReplicaId) -> None:
        """Record that a prompt with these prefixes was sent to a replica."""
        for key in keys:
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)
