from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache

import pytest
from fastapi import routing
from fastapi.testclient import TestClient

from helpers.fake_engine import FakeEngine
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig

# The same for every application, of which each test has its own: half of the time to make one.
routing.create_model_field = cache(routing.create_model_field)


@pytest.fixture
def serve() -> Callable[..., TestClient]:
    """A client of an application over a fake engine: that one, or one that says so."""
    with ExitStack() as stack:

        def start(engine: FakeEngine | str = "hello", **options) -> TestClient:
            engine = FakeEngine(engine) if isinstance(engine, str) else engine
            app = create_app(engine, ServerConfig(**options))
            client = TestClient(
                app, raise_server_exceptions=False, root_path=options.get("root_path", "")
            )
            return stack.enter_context(client)

        yield start
