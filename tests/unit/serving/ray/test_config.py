from __future__ import annotations

import sys

import pytest

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.serving.ray.config import RayConfig, require_ray


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas=0"),
        ({"ray_num_cpus": -1.0}, "ray_num_cpus"),
        ({"ray_upscale_delay_s": -1.0}, "ray_upscale_delay_s"),
        ({"ray_downscale_delay_s": float("nan")}, "ray_downscale_delay_s"),
        ({"ray_max_surge_percent": 101}, "ray_max_surge_percent"),
        ({"replicas": 2, "ray_max_replicas": 4}, "contradict"),
        ({"ray_min_replicas": 3, "ray_max_replicas": 2}, "above"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RayConfig(**options)


def test_without_ray_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"sametoken\[ray\]"):
        require_ray()


def test_with_ray_nothing_is_said():
    require_ray()
