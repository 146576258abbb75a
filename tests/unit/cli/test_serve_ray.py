from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from sametoken.cli.main import app
from sametoken.serving.ray import serve
from sametoken.serving.ray.config import RayConfig


def run(*arguments: str):
    return CliRunner().invoke(app, ["serve", "toy", *arguments])


def test_options_of_ray_need_ray():
    done = run("--replicas", "2")
    assert (done.exit_code, "add --ray" in done.output) == (2, True)


def test_without_the_extra_ray_is_unsupported(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    done = run("--ray")
    assert (done.exit_code, "sametoken[ray]" in done.output) == (3, True)


@pytest.mark.parametrize(("interrupted", "exit_code"), [(False, 0), (True, 130)])
def test_options_reach_the_deployment(monkeypatch, interrupted, exit_code):
    given = []

    def note(*options) -> bool:
        given.extend(options)
        return interrupted

    monkeypatch.setattr(serve, "run", note)
    words = (
        "--ray --ray-min-replicas 2 --ray-max-replicas 5 --port 99 --max-waiting 7 --dtype float32"
    )
    assert run(*words.split()).exit_code == exit_code
    engine, limits, server, ray_config = given
    assert (engine.model, engine.dtype) == ("toy", "float32")
    assert (limits.max_waiting, server.port) == (7, 99)
    assert ray_config == replace(RayConfig(), ray_min_replicas=2, ray_max_replicas=5)
