"""``sametoken serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from sametoken.cli.options import options_of, with_options
from sametoken.config import DEFAULT_MODEL, MODEL_HELP, EngineConfig
from sametoken.errors import ConfigError
from sametoken.io.json_text import parse_json
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.listen import bind, check_certificate
from sametoken.serving.limits import ServingLimits
from sametoken.serving.ray.config import RayConfig, require_ray

API_KEY_VARIABLE = "SAMETOKEN_API_KEY"


@with_options(
    options_of(ServerConfig),
    options_of(ServingLimits),
    options_of(RayConfig),
    options_of(EngineConfig, ("model", "skip_tokenizer_init")),
)
def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    trust_remote_code: Annotated[
        bool, typer.Option(help="vLLM option without effect: code of a checkpoint is never run")
    ] = False,
    enable_chunked_prefill: Annotated[
        bool | None, typer.Option(help="vLLM option without effect: prefill is always chunked")
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option(help="vLLM option without effect: requests with tools need no flag")
    ] = False,
    additional_config: Annotated[
        str | None, typer.Option(help="vLLM option without effect: a JSON object")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="serve on a Ray cluster")] = False,
    **options: Any,
) -> None:
    """Serve a model: an OpenAI-compatible API, metrics and a web page.

    The API key can also be set in the environment variable SAMETOKEN_API_KEY.
    """
    if enable_chunked_prefill is False:
        raise ConfigError("prefill is always chunked", "leave the option out")
    for flag, given, why in (
        ("--trust-remote-code", trust_remote_code, "code of a checkpoint is never run"),
        ("--enable-chunked-prefill", enable_chunked_prefill, "prefill is always chunked"),
        ("--enable-auto-tool-choice", enable_auto_tool_choice, "requests with tools need no flag"),
    ):
        if given:
            typer.echo(f"{flag} has no effect: {why}", err=True)
    if additional_config is not None:
        _announce_ignored(additional_config)
    limits = ServingLimits(**_take(ServingLimits, options))
    config = _server_config(_take(ServerConfig, options))
    ray_config = _ray_config(_take(RayConfig, options), ray)
    engine_config = EngineConfig.from_options(model=model, **options)
    check_certificate(config)
    if ray_config is not None:
        from sametoken.serving.ray.serve import run as run_on_ray

        if run_on_ray(engine_config, limits, config, ray_config):
            raise KeyboardInterrupt
        return
    with bind(config) as listener:
        from sametoken.serving.http.run import run

        interrupted = run(engine_config, limits, config, listener)
    if interrupted:
        raise KeyboardInterrupt


def _take(kind: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that are fields of a dataclass, and return them."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: options.pop(name) for name in names}


def _server_config(given: Mapping[str, Any]) -> ServerConfig:
    """Build the server's options; lists become tuples.

    Raises:
        ConfigError: a value is impossible.
    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    if not values["api_key"] and os.environ.get(API_KEY_VARIABLE):
        values["api_key"] = (os.environ[API_KEY_VARIABLE],)
    return ServerConfig(**values)


def _ray_config(given: Mapping[str, Any], wanted: bool) -> RayConfig | None:
    """Build Ray's options; None without Ray.

    Raises:
        ConfigError: a value is impossible, or was given without Ray.
        UnsupportedError: Ray is not installed.
    """
    ray_config = RayConfig(**given)
    if wanted:
        require_ray()
        return ray_config
    if ray_config != RayConfig():
        raise ConfigError("options of Ray were given", "add --ray, or leave them out")
    return None


def _announce_ignored(additional_config: str) -> None:
    """Print which of vLLM's additional settings have no effect.

    Raises:
        ConfigError: it is not a JSON object.
    """
    try:
        keys = parse_json(additional_config).keys()
    except (ValueError, AttributeError) as error:
        raise ConfigError("additional_config is not a JSON object", "leave it out") from error
    names = ", ".join(keys) or "nothing"
    typer.echo(f"--additional-config has no effect: {names}", err=True)
