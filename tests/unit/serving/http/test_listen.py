from __future__ import annotations

import os
import resource
import shutil
import socket

import pytest

from helpers.cli import invoke
from helpers.http_server import write_certificate
from sametoken.errors import ConfigError
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.listen import (
    address_of,
    bind,
    check_certificate,
    connections_that_fit,
    raise_descriptor_limit,
)

USAGE = 2


def test_a_bound_address_refuses_until_somebody_listens():
    config = ServerConfig(port=0)
    with bind(config) as listener:
        host, port = listener.getsockname()
        assert address_of(listener, config) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port), timeout=1)


def test_an_address_of_the_newer_kind():
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    config = ServerConfig(host="::1", port=0)
    try:
        listener = bind(config)
    except ConfigError:
        pytest.skip("this machine has no IPv6 address")
    with listener:
        assert address_of(listener, config).startswith("http://[::1]:")


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid", "no..host"])
def test_an_address_that_cannot_be_used(host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(host=host, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="another host or port"):
            bind(config)


def test_a_certificate_that_is_none(tmp_path):
    path = tmp_path / "cert.pem"
    path.write_text("nothing")
    config = ServerConfig(ssl_certfile=str(path), ssl_keyfile=str(path))
    with pytest.raises(ConfigError, match="PEM certificate"):
        check_certificate(config)
    check_certificate(ServerConfig())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_good_certificate(tmp_path):
    config = ServerConfig(**write_certificate(tmp_path), port=0)
    check_certificate(config)
    with bind(config) as listener:
        assert address_of(listener, config).startswith("https://")


def test_the_command_says_so_before_any_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = ["serve", "no/such/model", "--port", str(taken.getsockname()[1])]
        result = invoke(*command)
    assert result.exit_code == USAGE
    assert "another host or port" in result.output


@pytest.fixture
def limits(monkeypatch):
    """The process's soft and hard limit of descriptors."""
    now = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: now.__setitem__(slice(None), new))
    return now


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 2**20), (65536, 2**20)),
        ((2**17, 2**20), (2**17, 2**20)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY,) * 2, (resource.RLIM_INFINITY,) * 2),
    ],
)
def test_descriptors_are_asked_for_within_reason(limits, before, after):
    limits[:] = before
    raise_descriptor_limit()
    assert tuple(limits) == after


def test_connections_leave_descriptors_for_the_rest(limits, caplog):
    in_use = len(os.listdir("/dev/fd"))
    limits[0] = in_use + 2000
    assert connections_that_fit(1024) == 1024
    assert caplog.text == ""
    limits[0] = in_use + 1000
    assert 700 < connections_that_fit(1024) < 800
    assert "max_connections" in caplog.text
    limits[0] = in_use + 100
    assert 40 < connections_that_fit(1024) < 60
    limits[0] = 1
    assert connections_that_fit(1024) >= 1
    limits[0] = resource.RLIM_INFINITY
    assert connections_that_fit(1024) == 1024
