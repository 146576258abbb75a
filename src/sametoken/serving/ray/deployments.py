"""Ray Serve deployments: the HTTP gateway with retries, and the replica with its engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sametoken.config import EngineConfig
from sametoken.errors import EngineDeadError
from sametoken.serving.async_llm import AsyncLLM
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.errors import as_api_error, is_of_messages, path_of
from sametoken.serving.http.generation import Framing, while_connected
from sametoken.serving.http.in_process import AppRequest, messages_of
from sametoken.serving.http.messages_api.answer import MessageFraming
from sametoken.serving.http.middleware import BodyBounds, BodyLimit
from sametoken.serving.limits import ServingLimits
from sametoken.serving.ray.router import prefix_keys
from sametoken.types.sampling_params import replica_seed

#: Ray's errors for a lost replica; the request may or may not have begun there.
LOST = (RayActorError, NodeDiedError, ObjectLostError)
#: Header with the id of the replica that answered.
REPLICA_HEADER = b"x-sametoken-replica"
#: Seconds between attempts. Replicas without an engine process restart it meanwhile.
_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_UNAVAILABLE = 503
_logger = logging.getLogger("sametoken.server")


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request with the router's data.

    Attributes:
        request: the request.
        keys: keys of its prompt, see ``prefix_keys``.
        avoided: ids of replicas that could not serve it.
    """

    request: AppRequest
    keys: tuple[int, ...]
    avoided: frozenset[str] = frozenset()


class Gateway:
    """Forwards requests to replicas, and retries if a replica dies before the response begins.

    Retries are safe because a request's tokens do not depend on the replica.

    Args:
        replicas: Ray Serve's handle of the replicas' deployment.
        bounds: limits of request bodies.
        root_path: the path under which a proxy serves the API.
    """

    def __init__(self, replicas: Any, bounds: BodyBounds, root_path: str) -> None:
        self._replicas = replicas.options(stream=True)
        self._bounds = bounds
        self._root_path = root_path

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application for ``serve.ingress``."""
        app = Starlette(routes=[Mount("/", app=self.forward)])
        app.add_middleware(BodyLimit, bounds=self._bounds)
        return app

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whose body ``BodyLimit`` has read (ASGI)."""
        body = (await receive())["body"]
        request = AppRequest(
            scope["method"],
            scope["path"],
            scope["query_string"],
            tuple(scope["headers"]),
            body,
            tuple(scope["client"]) if scope.get("client") else None,
            self._root_path,
        )
        answer = _Answer(scope, receive, send)
        keys = await asyncio.to_thread(prefix_keys, body)
        await while_connected(receive, self._answer(Forwarded(request, keys), answer))

    async def _answer(self, request: Forwarded, answer: _Answer) -> None:
        for delay_s in _DELAYS_S:
            try:
                unavailable = await self._attempt(request, answer, is_last=False)
                if unavailable is None:
                    return
                request = replace(request, avoided=request.avoided | {unavailable})
            except LOST as error:
                _logger.warning("a replica was lost: %s", error)
                if answer.begun:
                    await answer.fail()
                    return
            await asyncio.sleep(delay_s)
        try:
            await self._attempt(request, answer, is_last=True)
        except LOST as error:
            _logger.error("no replica answers: %s", error)
            await answer.fail()

    async def _attempt(self, request: Forwarded, answer: _Answer, *, is_last: bool) -> str | None:
        """Send the request to one replica.

        Returns:
            The replica's id if it is unavailable and another may answer; None if the response is
            complete.

        Raises:
            One of LOST: the replica is gone.
        """
        messages = self._replicas.respond.remote(request)
        try:
            async for message in messages:
                repeatable = not is_last and request.request.method == "POST"
                if message.get("status") == _UNAVAILABLE and repeatable:
                    return dict(message["headers"])[REPLICA_HEADER].decode()  # type: ignore[no-any-return]
                await answer.take(message)
        finally:
            messages.cancel()
        return None


class _Answer:
    """A response to the client. Its start is held back until the first part of its body.

    Args:
        scope, receive, send: the request's (ASGI).
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi = scope, receive, send
        self._send = send
        self._start: Message | None = None
        self.begun = False

    async def take(self, message: Message) -> None:
        """Send a message, or hold it back until the next one."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if not self.begun and self._start is not None:
            self.begun = True
            await self._send(self._start)
        await self._send(message)

    async def fail(self) -> None:
        """Send an error: as a status, or as an event if the stream has begun."""
        error = EngineDeadError("the replica that computed the answer was lost", "send it again")
        answer, path = as_api_error(error), path_of(self._asgi[0])
        if not self.begun:
            await answer.response(path)(*self._asgi)
            return
        framing = MessageFraming() if is_of_messages(path) else Framing()
        events = framing.error(answer) + framing.end
        await self._send({"type": "http.response.body", "body": events})


class Replica:
    """A Ray Serve deployment; every replica has its own engine process.

    Raises:
        SametokenError: the engine cannot start.
    """

    async def __init__(  # type: ignore[misc]
        self, engine_config: EngineConfig, limits: ServingLimits, config: ServerConfig
    ) -> None:
        context = serve.get_replica_context()
        self._id: str = context.replica_id.unique_id
        # Requests of one prompt without a seed may reach any replica: no two draw equal seeds.
        seed = replica_seed(engine_config.seed, context.rank.rank)
        self._engine = await AsyncLLM.start(replace(engine_config, seed=seed), limits)
        self._app = create_app(self._engine, config)

    async def respond(self, forwarded: Forwarded) -> AsyncGenerator[Message, None]:
        """The application's response (ASGI); cancelling it aborts the request in the engine."""
        name = (REPLICA_HEADER, self._id.encode())
        async with contextlib.aclosing(messages_of(self._app, forwarded.request)) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], name]
                yield message

    async def check_health(self) -> None:
        """Ray's health check; Ray replaces a replica that stays without an engine.

        Raises:
            EngineDeadError: requests are not accepted.
        """
        if not self._engine.is_ready:
            raise EngineDeadError("the engine takes no requests", "see the replica's log")

    async def __del__(self) -> None:
        """Shut the engine down; called by Ray once the replica's requests have ended."""
        if hasattr(self, "_engine"):
            await self._engine.shutdown()
