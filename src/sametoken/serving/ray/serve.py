"""Deploys the server on Ray Serve: joins or starts a cluster, and reports failed deployments."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions, ProxyLocation, RequestRouterConfig

from sametoken.config import EngineConfig
from sametoken.errors import ConfigError
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.middleware import BodyBounds
from sametoken.serving.limits import ServingLimits
from sametoken.serving.ray.config import RayConfig
from sametoken.serving.ray.deployments import Gateway, Replica

APP = "sametoken"
#: Above every limit of the engine, which bounds its requests by blocks and its queue.
_MAX_ONGOING = 2**20
_HEALTH_PERIOD_S = 5.0
#: Places the gateway on the head node: the loss of any other node must cost only replicas.
_ON_HEAD = {"node:__internal_head__": 0.001}
_START_ATTEMPTS = 3
#: Ray's number of attempts to join a cluster, else 20. Each takes 41 s where nothing answers.
_JOIN_ATTEMPTS_VARIABLE, _JOIN_ATTEMPTS = "RAY_gcs_server_port_wait_time_s", "2"
_logger = logging.getLogger("sametoken.server")


def run(
    engine_config: EngineConfig, limits: ServingLimits, config: ServerConfig, ray_config: RayConfig
) -> bool:
    """Deploy the server on the available Ray cluster, or on a new one of this machine.

    On an existing cluster this returns once the application is healthy, and the application
    stays; another call with other options is a rolling update. Otherwise this process starts a
    cluster, and ends it on SIGTERM or SIGINT.

    Returns:
        Whether SIGINT ended it.

    Raises:
        ConfigError: the application cannot be deployed.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("sametoken").setLevel(config.log_level.upper())
    is_ours = connect()
    try:
        deploy(engine_config, limits, config, ray_config)
        _logger.info("serving %s at port %d on Ray", engine_config.model, config.port)
        if not is_ours:
            return False
        interrupted = _wait_for_signal() == signal.SIGINT
        serve.delete(APP)
        return interrupted
    finally:
        if is_ours:
            serve.shutdown()
        ray.shutdown()


def deploy(
    engine_config: EngineConfig, limits: ServingLimits, config: ServerConfig, ray_config: RayConfig
) -> None:
    """Deploy the application, or update it, and wait until it is healthy.

    Raises:
        ConfigError: it does not become healthy.
    """
    http = HTTPOptions(
        host=config.host,
        port=config.port,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    # The proxy runs on the gateway's node: connections are lost with their node.
    serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=http)
    application = build_application(engine_config, limits, config, ray_config)
    try:
        serve.run(application, name=APP, route_prefix="/")
    except RuntimeError as error:
        raise ConfigError(
            f"the application cannot be deployed ({_failure_message(str(error))})",
            "see the log of its replicas",
        ) from error


def build_application(
    engine_config: EngineConfig, limits: ServingLimits, config: ServerConfig, ray_config: RayConfig
) -> Any:
    """The gateway over the replicas, for ``serve.run``."""
    engine_config = replace(engine_config, device=device_on_ray(engine_config.device))
    slots = num_slots(engine_config)
    replicas = serve.deployment(
        Replica,
        name="replicas",
        ray_actor_options={
            "num_cpus": ray_config.ray_num_cpus,
            "num_gpus": num_gpus(engine_config),
        },
        request_router_config=RequestRouterConfig(
            request_router_class="sametoken.serving.ray.router.PrefixRouter",
            request_router_kwargs={"max_lead": max(1, slots // 4)},
        ),
        max_surge_percent=ray_config.ray_max_surge_percent,
        health_check_period_s=_HEALTH_PERIOD_S,
        max_constructor_retry_count=_START_ATTEMPTS,
        **_replica_options(ray_config, slots),
        **_common_options(config),
    ).bind(engine_config, limits, config)
    return serve.deployment(
        serve.ingress()(Gateway),
        name="gateway",
        ray_actor_options={"num_cpus": 0, "resources": _ON_HEAD},
        **_common_options(config),
    ).bind(replicas, BodyBounds.of(config), config.root_path)


def _common_options(config: ServerConfig) -> dict[str, Any]:
    return {
        "max_ongoing_requests": _MAX_ONGOING,
        "graceful_shutdown_timeout_s": config.drain_timeout,
        "logging_config": {"log_level": config.log_level.upper(), "enable_access_log": False},
    }


def _replica_options(ray_config: RayConfig, slots: int) -> dict[str, Any]:
    if not ray_config.ray_max_replicas:
        return {"num_replicas": ray_config.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=ray_config.ray_min_replicas,
            max_replicas=ray_config.ray_max_replicas,
            target_ongoing_requests=ray_config.ray_target_ongoing_requests or slots,
            upscale_delay_s=ray_config.ray_upscale_delay_s,
            downscale_delay_s=ray_config.ray_downscale_delay_s,
        )
    }


def _failure_message(default: str) -> str:
    """The failure message of one of the application's deployments, else ``default``."""
    application = serve.status().applications.get(APP)
    deployments = application.deployments.values() if application else ()
    return next((last_line(one.message) for one in deployments if one.message), default)


def _wait_for_signal() -> int:
    """Wait for SIGTERM or SIGINT; returns the first."""
    arrived = threading.Event()
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        arrived.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    arrived.wait()
    return received[0]


def connect() -> bool:
    """Join the cluster of this process, of this machine or of RAY_ADDRESS, else start one.

    Returns:
        Whether a cluster was started, as RAY_ADDRESS=local asks for.

    Raises:
        ConfigError: there is an address, and no cluster answers there; or none can be started.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS")
    if address == "local":
        start_cluster()
        return True
    try:
        with _few_attempts():
            ray.init(address="auto", log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        # Ray found no address if its error has no cause.
        if address or error.__cause__ is not None:
            raise _unreachable(address, error) from error
        start_cluster()
        return True
    return False


@contextlib.contextmanager
def _few_attempts() -> Iterator[None]:
    """Let Ray give a cluster up soon, unless the user chose; a new one gets Ray's own time."""
    if _JOIN_ATTEMPTS_VARIABLE in os.environ:
        yield
        return
    os.environ[_JOIN_ATTEMPTS_VARIABLE] = _JOIN_ATTEMPTS
    try:
        yield
    finally:
        del os.environ[_JOIN_ATTEMPTS_VARIABLE]


def _unreachable(address: str | None, error: Exception) -> ConfigError:
    if address:
        return ConfigError(
            f"the Ray cluster of RAY_ADDRESS={address} cannot be joined ({error})",
            "start it, correct RAY_ADDRESS, or unset it to use a cluster of this machine",
        )
    return ConfigError(
        f"this machine's last Ray cluster does not answer ({error})",
        "run ray stop, which forgets it, or name another cluster in RAY_ADDRESS",
    )


def start_cluster(**options: Any) -> None:
    """Start Ray in this process; ``options`` are those of ``ray.init``.

    Raises:
        ConfigError: it does not start.
    """
    # On a busy machine a proxy takes longer than the 5 s after which Serve kills it.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    try:
        ray.init(include_dashboard=False, **options)
    except Exception as error:
        # Ray has no type of its own for this: a node that does not come up is an ``Exception``.
        raise ConfigError(
            f"a Ray cluster cannot be started on this machine ({error})",
            "see Ray's logs, or name a running cluster in RAY_ADDRESS",
        ) from error


def device_on_ray(device: str) -> str:
    """Resolve ``auto``: GPUs if the cluster has any, else CPUs."""
    if device != "auto":
        return device
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def num_gpus(config: EngineConfig) -> int:
    """GPUs of one engine, whose device is resolved."""
    return config.tensor_parallel_size if config.device == "cuda" else 0


def num_slots(config: EngineConfig) -> int:
    """``max_num_seqs`` of one engine, whose device is resolved."""
    # Engines on Ray import this module, and need no torch in the process that serves.
    import torch

    from sametoken.engine.resolve import resolve_sizes

    return resolve_sizes(config, torch.device(config.device)).max_num_seqs


def last_line(text: str) -> str:
    """The last line of a remote traceback: the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"
