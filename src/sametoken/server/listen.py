"""What must hold before a model is loaded: the address is free, and the certificate good."""

from __future__ import annotations

import socket
import ssl

from sametoken.errors import ConfigError
from sametoken.server.config import ServerConfig


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


def _unusable(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"the server cannot listen on {config.host} port {config.port} ({error})",
        "choose another host or port",
    )
