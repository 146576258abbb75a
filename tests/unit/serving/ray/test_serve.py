from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import ray
from ray import serve

from sametoken.config import EngineConfig
from sametoken.errors import ConfigError
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.middleware import BodyBounds
from sametoken.serving.limits import ServingLimits
from sametoken.serving.ray import serve as cluster
from sametoken.serving.ray import serve as ours
from sametoken.serving.ray.config import RayConfig
from sametoken.serving.ray.serve import build_application, deploy

LIMITS = ServingLimits()
SERVER = ServerConfig(drain_timeout=7.0, max_request_bytes=99, root_path="/under")


def deployments(engine: dict, **options):
    """The two deployments of an application, the gateway first."""
    config = EngineConfig.from_options(**engine)
    gateway = build_application(config, LIMITS, SERVER, RayConfig(**options))
    (replicas, *_) = gateway._bound_deployment.init_args
    return gateway._bound_deployment, replicas._bound_deployment


@pytest.mark.parametrize(
    ("engine", "num_gpus"),
    [
        ({"device": "cpu", "lora_modules": {"sql": "./a"}}, 0),
        ({"device": "cpu", "tensor_parallel_size": 2}, 0),
        ({"device": "cuda"}, 1),
        ({"device": "cuda", "tensor_parallel_size": 2}, 2),
    ],
)
def test_every_replica_has_its_devices(engine, num_gpus):
    gateway, replicas = deployments(engine, replicas=3, ray_num_cpus=2.0)
    assert replicas.num_replicas == 3
    assert replicas.ray_actor_options["num_gpus"] == num_gpus
    assert replicas.ray_actor_options["num_cpus"] == 2.0
    # Where no other node's loss takes it.
    assert gateway.ray_actor_options["num_cpus"] == 0
    assert list(gateway.ray_actor_options["resources"]) == ["node:__internal_head__"]
    assert gateway.init_args[1:] == (BodyBounds.of(SERVER), "/under")
    assert replicas.init_args == (EngineConfig(**engine), LIMITS, SERVER)


def test_requests_wait_in_the_engine_and_not_in_ray():
    for deployment in deployments({"device": "cpu"}):
        assert deployment.max_ongoing_requests > LIMITS.max_waiting
        assert deployment._deployment_config.graceful_shutdown_timeout_s == 7.0


def test_replicas_follow_the_load_where_that_is_asked_for():
    options = {"ray_min_replicas": 2, "ray_max_replicas": 5}
    _, replicas = deployments({"device": "cpu", "max_num_seqs": 24}, **options)
    scaling = replicas._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert scaling.target_ongoing_requests == 24
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (30.0, 600.0)
    options |= {"ray_target_ongoing_requests": 3, "ray_upscale_delay_s": 2.0}
    _, replicas = deployments({"device": "cpu"}, **options, ray_downscale_delay_s=9.0)
    scaling = replicas._deployment_config.autoscaling_config
    assert scaling.target_ongoing_requests == 3
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (2.0, 9.0)


def test_the_router_is_told_how_far_ahead_a_replica_may_be():
    _, replicas = deployments({"device": "cpu", "max_num_seqs": 64}, ray_max_surge_percent=50)
    router = replicas._deployment_config.request_router_config
    assert router.request_router_class.endswith("PrefixRouter")
    assert router.request_router_kwargs == {"max_lead": 16}
    assert replicas._deployment_config.max_surge_percent == 50
    _, replicas = deployments({"device": "cpu", "max_num_seqs": 3})
    router = replicas._deployment_config.request_router_config
    assert router.request_router_kwargs == {"max_lead": 1}


@pytest.mark.parametrize(
    ("gpus", "device"), [({"GPU": 1.0}, "cuda"), ({"GPU": 0.5}, "cpu"), ({}, "cpu")]
)
def test_auto_is_what_the_cluster_has(monkeypatch, gpus, device):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0} | gpus)
    assert cluster.device_on_ray("auto") == device
    assert cluster.device_on_ray("cpu") == "cpu"


def test_a_cluster_is_joined_before_one_is_started(monkeypatch):
    asked = []

    def init(**options):
        asked.append(options.get("address"))
        if options.get("address") == "auto":
            raise ConnectionError

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    assert cluster.connect()
    assert asked == ["auto", None]
    monkeypatch.setattr(ray, "init", lambda **options: None)
    assert not cluster.connect()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "init", None)
    assert not cluster.connect()


def test_a_local_address_asks_for_a_cluster_of_our_own(monkeypatch):
    asked = []
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(options.get("address")))
    assert cluster.connect()
    assert asked == [None]


@pytest.mark.parametrize("address", ["local", ""])
def test_a_cluster_that_does_not_start_says_why(monkeypatch, address):
    def init(**options):
        raise ConnectionError if options.get("address") else Exception("the store is too large")

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match="the store is too large"):
        cluster.connect()


ATTEMPTS = "RAY_gcs_server_port_wait_time_s"
TIMEOUTS = ("RAY_gcs_rpc_server_connect_timeout_s", "RAY_py_gcs_connect_timeout_s")
RUN = """
import sys
from sametoken.errors import ConfigError
from sametoken.serving.ray.serve import connect
try:
    connect()
except ConfigError as error:
    sys.exit(str(error))
"""


def test_a_cluster_that_does_not_answer_is_given_up():
    short = dict.fromkeys((ATTEMPTS, *TIMEOUTS), "1")
    with socket.socket() as silent:
        # Bound and not listening: no other process can answer there.
        silent.bind(("", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", RUN],
            env=os.environ | short | {"RAY_ADDRESS": address},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _, said = process.communicate(timeout=120)
    last = said.splitlines()[-1]
    assert last.startswith(f"the Ray cluster of RAY_ADDRESS={address} cannot be joined")
    assert "correct RAY_ADDRESS" in last
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize(
    ("address", "error", "cause", "remedy"),
    [
        ("10.0.0.1:6379", ConnectionError("no"), RuntimeError(), "correct RAY_ADDRESS"),
        ("ray://10.0.0.1:10001", ConnectionError("no"), None, "correct RAY_ADDRESS"),
        ("nonsense", ValueError("Invalid address format"), None, "correct RAY_ADDRESS"),
        ("", ConnectionError("no"), RuntimeError(), "ray stop"),
    ],
)
@pytest.mark.parametrize(("given", "tried"), [(None, "2"), ("7", "7")])
def test_an_unreachable_cluster_is_tried_once_and_not_replaced(
    monkeypatch, address, error, cause, remedy, given, tried
):
    seen = []

    def fail(**options):
        seen.append(os.environ.get(ATTEMPTS))
        raise error from cause

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.delenv(ATTEMPTS, raising=False)
    if given is not None:
        monkeypatch.setenv(ATTEMPTS, given)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ConfigError, match=remedy) as caught:
        cluster.connect()
    assert str(error) in caught.value.cause
    assert seen == [tried]
    # A cluster of our own has Ray's time to start.
    assert os.environ.get(ATTEMPTS) == given


def test_a_failed_deployment_says_why(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("failed")

    started = {}
    monkeypatch.setattr(serve, "start", lambda **options: started.update(options))
    monkeypatch.setattr(serve, "run", fail)
    monkeypatch.setattr(
        ours, "_failure_message", lambda default: cluster.last_line("a\n  the cause\n\n")
    )
    with pytest.raises(ConfigError, match=r"\(the cause\)"):
        deploy(EngineConfig(device="cpu"), LIMITS, SERVER, RayConfig())
    assert cluster.last_line(" \n") == "no reason was given"
    # Connections to any other node would be lost with it.
    assert started["proxy_location"] == "HeadOnly"
    assert started["http_options"].port == SERVER.port


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What Ray was told, in order."""
    said: list[str] = []
    for module, name in ((serve, "delete"), (serve, "shutdown"), (ray, "shutdown")):
        label = f"{module.__name__}.{name}"
        monkeypatch.setattr(module, name, lambda *_, label=label: said.append(label))
    monkeypatch.setattr(ours, "deploy", lambda *_: said.append("deploy"))
    return said


def run() -> bool:
    return ours.run(EngineConfig(device="cpu"), LIMITS, SERVER, RayConfig())


def test_on_a_cluster_that_was_there_the_application_stays(told, monkeypatch):
    monkeypatch.setattr(ours, "connect", lambda: False)
    assert not run()
    assert told == ["deploy", "ray.shutdown"]


@pytest.mark.parametrize(
    ("number", "interrupted"), [(signal.SIGTERM, False), (signal.SIGINT, True)]
)
def test_a_cluster_of_our_own_ends_with_a_signal(told, monkeypatch, number, interrupted):
    monkeypatch.setattr(ours, "connect", lambda: True)
    former = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
    timer.start()
    try:
        assert run() == interrupted
    finally:
        timer.join()
        for one, handler in former.items():
            signal.signal(one, handler)
    assert told == ["deploy", "ray.serve.delete", "ray.serve.shutdown", "ray.shutdown"]


def test_a_failure_leaves_no_cluster_behind(told, monkeypatch):
    def fail(*arguments):
        raise ConfigError("no")

    monkeypatch.setattr(ours, "connect", lambda: True)
    monkeypatch.setattr(ours, "deploy", fail)
    with pytest.raises(ConfigError):
        run()
    assert told == ["ray.serve.shutdown", "ray.shutdown"]
