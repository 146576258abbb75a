"""A trainer's side of updates: servers that are none, and a server that leaves."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from helpers.http_server import free_port
from sametoken.distributed.trainer_group import TrainerGroup
from sametoken.errors import ConfigError, WeightUpdateError
from sametoken.serving.weight_sender import WeightSender
from sametoken.types.weight_updates import GLOO, Rendezvous

PATIENCE_S = 30.0


@pytest.mark.parametrize("url", ["http://localhost:80x", "http://local host:80", "localhost"])
def test_a_url_that_is_none(url):
    with pytest.raises(WeightUpdateError, match="Check the URL"):
        WeightSender([url])


@pytest.mark.parametrize("key", ["clé", "a b", "key\n", "\udcff"])
def test_a_key_that_no_header_holds_is_refused(key):
    with pytest.raises(ConfigError, match="the API key has"):
        WeightSender(["http://127.0.0.1:9"], api_key=key)


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


class Leaving(BaseHTTPRequestHandler):
    """A server that joins a trainer's group, and leaves it in the midst of an update."""

    group: TrainerGroup | None = None

    def do_GET(self) -> None:
        self.answer(200, {"vllm_config": {"weight_transfer_config": {"backend": GLOO}}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/update_weights":
            type(self).group = None
            self.answer(400, {"error": "no memory"})
            return
        if info := body.get("init_info"):
            place = (info["master_address"], info["master_port"], 1, 2)
            type(self).group = TrainerGroup(Rendezvous(GLOO, *place, PATIENCE_S))
        self.answer(200, {})

    def answer(self, status: int, told: dict) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_after_a_failure_another_sender_takes_its_port():
    port = free_port()
    with ThreadingHTTPServer(("127.0.0.1", 0), Leaving) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            urls = [f"http://127.0.0.1:{server.server_port}"]
            sender = WeightSender(urls, port=port, timeout_s=PATIENCE_S)
            weights = [("a", torch.zeros(4))]
            with pytest.raises(WeightUpdateError, match="no memory"):
                sender.send(weights)
            with pytest.raises(WeightUpdateError, match="Make a new sender"):
                sender.send(weights)
            # While the one that failed is still there.
            assert WeightSender(urls, port=port, timeout_s=PATIENCE_S) is not sender
        finally:
            server.shutdown()
            Leaving.group = None


@pytest.mark.parametrize("urls", ["http://a", [], ["http://a", "http://a/"]])
def test_each_server_is_given_once(urls):
    with pytest.raises(WeightUpdateError, match="no list of servers"):
        WeightSender(urls)
