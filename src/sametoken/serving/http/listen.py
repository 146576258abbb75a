"""What must hold before a model is loaded: a free address, a good certificate, descriptors."""

from __future__ import annotations

import logging
import os
import resource
import socket
import ssl

from sametoken.errors import ConfigError
from sametoken.serving.http.config import ServerConfig

#: Descriptors that the server asks for, and those that are kept for the engine and for files.
_DESCRIPTORS, _RESERVED = 65536, 256
_logger = logging.getLogger("sametoken.server")


def bind(config: ServerConfig) -> socket.socket:
    """A socket at the address, not listening yet: nobody connects before the model is there.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(config, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(config, error) from error
    return listener


def address_of(listener: socket.socket, config: ServerConfig) -> str:
    """Where a bound socket will answer, as a URL."""
    host, port, *_ = listener.getsockname()
    scheme = "https" if config.ssl_certfile else "http"
    shown = f"[{host}]" if listener.family == socket.AF_INET6 else host
    return f"{scheme}://{shown}:{port}"


def check_certificate(config: ServerConfig) -> None:
    """Load the certificate once, if there is one.

    Raises:
        ConfigError: it or its key cannot be used.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password, so that nobody is asked for one.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate {config.ssl_certfile} cannot be used ({error})",
            "give a PEM certificate and its own key, without a password",
        ) from error


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as the system allows it, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_that_fit(wanted: int) -> int:
    """How many of the wanted connections the process has descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    free = max(2, soft - len(os.listdir("/dev/fd")))
    fitting = min(wanted, free - min(_RESERVED, free // 2))
    if fitting < wanted:
        _logger.warning(
            "%d connections at most: %d descriptors (ulimit -n) are too few for max_connections=%d",
            fitting,
            soft,
            wanted,
        )
    return fitting


def _unusable(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"the server cannot listen on {config.host} port {config.port} ({error})",
        "choose another host or port",
    )
