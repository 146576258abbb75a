from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from sametoken.serving.http.connections import Connections, LogRateLimit
from sametoken.serving.http.listen import listen


class Held:
    """Stands for a connection."""

    is_open = True

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.socket: socket.socket | None = None

    def begin(self, client: socket.socket, context) -> None:
        self.socket = client

    def drop(self) -> None:
        self.connections.remove(self)
        self.socket.close()

    @property
    def is_dropped(self) -> bool:
        return self.socket.fileno() == -1


async def taken(connections: Connections, made: list[Held], listener: socket.socket) -> None:
    """One more connection, as far as the server."""
    client = socket.create_connection(listener.getsockname())
    before = len(made)
    for _ in range(20):
        await asyncio.sleep(0.001)
        if len(made) > before:
            break
    client.close()


@pytest.mark.parametrize(
    ("waits", "dropped"),
    [
        ({}, [True, False, False, False]),
        ({0: False}, [False, True, False, False]),
        # The first waits again, but not for as long.
        ({0: [False, True]}, [False, True, False, False]),
        ({0: False, 1: False, 2: False}, [False, False, False]),
    ],
)
async def test_who_waits_longest_makes_room(waits, dropped):
    connections = Connections(3)
    made: list[Held] = []

    def make() -> Held:
        made.append(Held(connections))
        return made[-1]

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listen(listener)
        connections.accept_from(listener, make, None)
        for _ in range(3):
            await taken(connections, made, listener)
        for index, states in waits.items():
            for state in [states] if isinstance(states, bool) else states:
                connections.note(made[index], waits=state)
        await taken(connections, made, listener)
        assert len(connections) == 3
        assert [one.is_dropped for one in made] == dropped
        connections.stop()
        await taken(connections, made, listener)
        assert len(made) == len(dropped)
    for one in made:
        one.socket.close()


def test_what_has_ended_is_forgotten_for_good():
    connections = Connections(1)
    held = Held(connections)
    connections.note(held, waits=True)
    connections.remove(held)
    assert len(connections) == 0


def test_a_kind_of_record_passes_once_a_second():
    clock = [0.0]
    log_limit = LogRateLimit(lambda: clock[0])

    def passes(text: str, level: int = logging.WARNING, error: Exception | None = None) -> bool:
        told = (type(error), error, None) if error else None
        return bool(log_limit.filter(logging.LogRecord("a", level, "", 0, text, (1,), told)))

    assert [passes("%d once") for _ in range(3)] == [True, False, False]
    assert passes("%d other")
    assert passes("%d once", error=ValueError())
    assert passes("%d once", logging.INFO)
    clock[0] = 1.0
    assert [passes("%d once") for _ in range(2)] == [True, False]
