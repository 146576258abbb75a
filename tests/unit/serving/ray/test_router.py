from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from ray.serve.request_router import PendingRequest, ReplicaID

from sametoken.serving.http.in_process import AppRequest
from sametoken.serving.ray.deployments import Forwarded
from sametoken.serving.ray.router import PrefixRouter

REQUEST = AppRequest("POST", "/v1/completions")


@dataclass(frozen=True)
class Replica:
    replica_id: ReplicaID


A, B, C = (Replica(ReplicaID(name, "deployment")) for name in "abc")


@pytest.fixture
def router() -> PrefixRouter:
    """A router without the rest of Serve: nobody is busy."""
    made = object.__new__(PrefixRouter)
    made._replica_queue_len_cache = {}
    made.initialize_state(max_lead=2)
    return made


def pending(*keys: int, avoided: tuple[str, ...] = ()) -> PendingRequest:
    async def make() -> PendingRequest:
        forwarded = Forwarded(REQUEST, keys, frozenset(avoided))
        return PendingRequest(args=[forwarded], kwargs={}, metadata=SimpleNamespace())

    return asyncio.run(make())


def choose(router: PrefixRouter, request: PendingRequest) -> list[list[Replica]]:
    return asyncio.run(router.choose_replicas([A, B, C], request))


def test_an_unknown_prompt_may_go_anywhere(router):
    assert choose(router, pending(1, 2))[0] == [A, B, C]
    assert choose(router, pending())[0] == [A, B, C]


def test_a_prompt_goes_where_its_beginning_went(router):
    router.on_request_routed(pending(1, 2), B.replica_id, None)
    request = pending(1, 2, 3)
    assert choose(router, request) == [[B], [A, B, C]]
    assert request.routing_context.should_backoff
    assert choose(router, pending(4))[0] == [A, B, C]


@pytest.mark.parametrize(("queue", "first"), [(3, [B]), (4, [A, B, C])])
def test_not_to_a_replica_that_is_far_busier(router, queue, first):
    router.on_request_routed(pending(1), B.replica_id, None)
    router._replica_queue_len_cache = {A.replica_id: 1, B.replica_id: queue, C.replica_id: 1}
    assert choose(router, pending(1))[0] == first


def test_a_replica_that_was_unable_is_the_last_choice(router):
    router.on_request_routed(pending(1), B.replica_id, None)
    assert choose(router, pending(1, avoided=("b",))) == [[A, C], [A, B, C]]
    assert choose(router, pending(1, avoided=("a", "b", "c"))) == [[], [A, B, C]]
