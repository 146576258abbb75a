"""One engine behind the whole API, without a socket of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from ray import serve
from starlette.types import Message

from sametoken.config import EngineConfig
from sametoken.engine.async_llm import AsyncLLM
from sametoken.engine.serving_limits import ServingLimits
from sametoken.errors import EngineDeadError
from sametoken.server.app import create_app
from sametoken.server.config import ServerConfig
from sametoken.server.in_process import messages_of
from sametoken.server.ray.gateway import REPLICA_HEADER, Forwarded


class Replica:
    """A deployment of Ray Serve; every replica has an engine process of its own.

    Raises:
        SametokenError: the engine cannot start.
    """

    async def __init__(  # type: ignore[misc]
        self, engine_config: EngineConfig, limits: ServingLimits, config: ServerConfig
    ) -> None:
        self._id: str = serve.get_replica_context().replica_id.unique_id
        self._engine = await AsyncLLM.start(engine_config, limits)
        self._app = create_app(self._engine, config)

    async def respond(self, forwarded: Forwarded) -> AsyncGenerator[Message, None]:
        """The application's answer (ASGI); cancelled, it ends the request in the engine."""
        name = (REPLICA_HEADER, self._id.encode())
        async with contextlib.aclosing(messages_of(self._app, forwarded.request)) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], name]
                yield message

    async def check_health(self) -> None:
        """Called by Ray, which replaces a replica that stays without an engine.

        Raises:
            EngineDeadError: requests are not taken.
        """
        if not self._engine.is_ready:
            raise EngineDeadError("the engine takes no requests", "see the replica's log")

    async def __del__(self) -> None:
        """Called by Ray once the replica's requests have ended."""
        if hasattr(self, "_engine"):
            await self._engine.shutdown()
