"""A trainer's side of updates: servers that are none."""

from __future__ import annotations

import socket
import threading

import pytest

from sametoken.errors import WeightUpdateError
from sametoken.serving.weight_sender import WeightSender


@pytest.mark.parametrize("url", ["http://localhost:80x", "http://local host:80", "localhost"])
def test_a_url_that_is_none(url):
    with pytest.raises(WeightUpdateError, match="check the URL"):
        WeightSender([url])


def test_a_port_where_another_protocol_is_spoken():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(b"SSH-2.0-OpenSSH\r\n")

        greeter = threading.Thread(target=greet)
        greeter.start()
        with pytest.raises(WeightUpdateError, match=r"does not answer \(SSH-2.0-OpenSSH\)"):
            WeightSender([f"http://127.0.0.1:{listener.getsockname()[1]}"])
        greeter.join()
