"""``sametoken serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import typer

from sametoken.cli.config_file import ConfigFile
from sametoken.cli.options import options_of, take, with_options
from sametoken.cli.vllm_flags import as_flag, vllm_options
from sametoken.config import DEFAULT_MODEL, MODEL_HELP, EngineConfig
from sametoken.errors import ConfigError
from sametoken.models.names import at_revision
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.listen import bind, check_certificate
from sametoken.serving.limits import ServingLimits
from sametoken.serving.ray.config import RayConfig, require_ray
from sametoken.types.vllm_options import take_vllm_options

API_KEY_VARIABLE = "SAMETOKEN_API_KEY"


@with_options(
    options_of(ServerConfig),
    options_of(ServingLimits),
    options_of(RayConfig),
    options_of(EngineConfig, ("model", "skip_tokenizer_init")),
    vllm_options(),
)
def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help=MODEL_HELP, show_default=DEFAULT_MODEL)
    ] = None,
    model_option: Annotated[
        str | None, typer.Option("--model", help="MODEL, as an option", show_default=False)
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="branch, tag or commit of a hub id, as in MODEL@REVISION")
    ] = None,
    config: ConfigFile = None,
    ray: Annotated[bool, typer.Option("--ray", help="serve on a Ray cluster")] = False,
    **options: Any,
) -> None:
    """Serve a model: an OpenAI-compatible API, metrics and a web page.

    The API key can also be set in the environment variable SAMETOKEN_API_KEY. vLLM's flags that
    are not listed here are accepted where they change nothing, or refused with the reason.
    """
    if (notice := take_vllm_options(options, as_flag, ServerConfig.__slots__)) is not None:
        typer.echo(notice, err=True)
    source = ctx.get_parameter_source("model_option")
    if model is not None and source is not None and source.name == "DEFAULT_MAP":
        # It stands in --config, which the command line overrides.
        model_option = None
    model = _one_model(model, model_option)
    if revision is not None:
        # Clients name the model alone, as with vLLM.
        options["served_model_name"] = options["served_model_name"] or [model]
    limits = ServingLimits(**take(options, ServingLimits))
    server = _server_config(take(options, ServerConfig))
    ray_config = _ray_config(take(options, RayConfig), ray)
    for name in ("weight_transfer_config", "allow_runtime_lora_updating"):
        if ray_config is not None and getattr(server, name):
            raise ConfigError(
                f"{name} changes one engine, and Ray has several replicas",
                "serve each engine alone, or deploy again with other weights or lora_modules",
            )
    engine_config = EngineConfig.from_options(model=at_revision(model, revision), **options)
    server.require_apart(engine_config)
    check_certificate(server)
    if ray_config is not None:
        from sametoken.serving.ray.serve import run as run_on_ray

        if run_on_ray(engine_config, limits, server, ray_config):
            raise KeyboardInterrupt
        return
    with bind(server) as listener:
        from sametoken.serving.http.run import run

        interrupted = run(engine_config, limits, server, listener)
    if interrupted:
        raise KeyboardInterrupt


def _one_model(positional: str | None, option: str | None) -> str:
    """The model, however it was given.

    Raises:
        ConfigError: it was given twice, with different names.
    """
    if None not in (positional, option) and positional != option:
        raise ConfigError(
            f"two models were given, {positional!r} and --model {option!r}", "leave one out"
        )
    return positional or option or DEFAULT_MODEL


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
    values["allowed_origins"] = tuple(_origins(values["allowed_origins"]))
    return ServerConfig(**values)


def _origins(given: Iterable[str]) -> Iterator[str]:
    """Origins, which may stand in a list in JSON, as with vLLM."""
    for one in given:
        try:
            listed = json.loads(one)
        except ValueError:
            listed = one
        yield from map(str, listed) if isinstance(listed, list) else (one,)


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
