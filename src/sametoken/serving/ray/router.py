"""Sends prompts that begin alike to the replica whose prefix cache holds their beginning.

Which requests begin alike: keys of their prompts' prefixes, made before any tokenizer.
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


#: Characters of one key's block, near 128 tokens of English.
BLOCK_CHARS = 512
#: Longer prompts are told apart by their beginning alone.
MAX_KEYS = 256

Home = TypeVar("Home", bound=Hashable)


def prefix_keys(body: bytes) -> tuple[int, ...]:
    """Keys of a request's prompt, one per block of characters, each for all up to its end.

    Two requests have their first i keys in common if their prompts agree so far, whatever
    model's template they go through. A body that is no such request has none; its errors are
    told by whoever answers it.
    """
    try:
        request = read_json(body)
    except ValueError:
        return ()
    if not isinstance(request, dict):
        return ()
    text = _text(request)
    digest, keys = hashlib.blake2b(digest_size=8), []
    for end in range(BLOCK_CHARS, min(len(text), BLOCK_CHARS * MAX_KEYS) + 1, BLOCK_CHARS):
        digest.update(text[end - BLOCK_CHARS : end].encode("utf-8", "surrogatepass"))
        keys.append(int.from_bytes(digest.copy().digest()))
    return tuple(keys)


def _text(request: dict[str, Any]) -> str:
    """The prompt in one piece; what is added to a conversation comes at its end."""
    messages = request.get("messages")
    if isinstance(messages, list):
        tools = json.dumps(request.get("tools"), sort_keys=True)
        return tools + "".join(json.dumps(message, sort_keys=True) for message in messages)
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


class Homes(Generic[Home]):
    """Where prefixes were last sent, the ones unused for longest forgotten first.

    Args:
        capacity: keys that are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._homes: OrderedDict[int, Home] = OrderedDict()

    def find(self, keys: Sequence[int], present: set[Home]) -> Home | None:
        """Of those present, the one that saw the longest of these prefixes; None: nobody did."""
        for key in reversed(keys):
            home = self._homes.get(key)
            if home in present:
                return home
        return None

    def note(self, keys: Sequence[int], home: Home) -> None:
        """A prompt with these prefixes was sent there."""
        for key in keys:
            self._homes[key] = home
            self._homes.move_to_end(key)
        while len(self._homes) > self._capacity:
            self._homes.popitem(last=False)
