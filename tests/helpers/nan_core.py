"""An engine whose logits are NaN."""

from __future__ import annotations

from types import SimpleNamespace

from sametoken.types.request import RequestUpdate


class NaNCore:
    """Every request fails at its first token."""

    has_unfinished = False
    resolved = SimpleNamespace(model=SimpleNamespace(eos_token_ids=()))

    def __init__(self) -> None:
        self.running: list[str] = []

    def add_request(self, request) -> None:
        self.running.append(request.request_id)

    def step(self) -> list[RequestUpdate]:
        return [RequestUpdate(name, (), 0, 0, True, 0, failed=True) for name in self.running]

    def release(self, name: str) -> None:
        self.running.remove(name)
