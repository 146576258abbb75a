"""The server's socket, and checks before a model is loaded: the TLS certificate, descriptors."""

from __future__ import annotations

import logging
import os
import resource
import socket
import ssl

from sametoken.errors import ConfigError, in_words
from sametoken.serving.http.config import ServerConfig

#: Descriptors that the server requests, and those reserved for the engine and for files.
_DESCRIPTORS, _RESERVED = 65536, 256
#: Bytes of the kernel's send buffer, and connections in its backlog.
_SEND_BYTES, _BACKLOG = 128 * 1024, 2048
_logger = logging.getLogger("sametoken.server")


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet, so that clients connect only to a loaded model.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _unusable(config, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(config, error) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Let clients connect to a bound socket, and wait there until they are accepted."""
    listener.setblocking(False)
    # Connections inherit it. A large buffer hides for minutes that a client reads nothing.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    listener.listen(_BACKLOG)


def address_of(listener: socket.socket, config: ServerConfig) -> str:
    """The URL of a bound socket."""
    host, port, *_ = listener.getsockname()
    scheme = "https" if config.ssl_certfile else "http"
    shown = f"[{host}]" if listener.family == socket.AF_INET6 else host
    return f"{scheme}://{shown}:{port}"


def check_certificate(config: ServerConfig) -> None:
    """Check that the certificate can be loaded, if there is one.

    Raises:
        ConfigError: it or its key cannot be used.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password, so that there is no prompt for one.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate {config.ssl_certfile} cannot be used ({in_words(error)})",
            "give a PEM certificate and its own key, without a password",
        ) from error


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit of descriptors to ``_DESCRIPTORS`` or the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_that_fit(wanted: int) -> int:
    """The number of wanted connections for which the process has descriptors."""
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


def _unusable(config: ServerConfig, error: Exception) -> ConfigError:
    return ConfigError(
        f"the server cannot listen on {config.host} port {config.port} ({in_words(error)})",
        "choose another host or port",
    )
