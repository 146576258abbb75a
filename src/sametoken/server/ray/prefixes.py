"""Which requests begin alike: keys of their prompts' prefixes, made before any tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

from sametoken.server.body import read_json

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
