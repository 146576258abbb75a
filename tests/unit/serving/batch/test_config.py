from __future__ import annotations

import pytest

from sametoken.errors import ConfigError
from sametoken.serving.batch.config import BatchConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": -1}, "concurrency=-1"),
        ({"ray": True, "replicas": 0}, "replicas=0"),
        ({"ray": True, "ray_num_cpus": -1.0}, "ray_num_cpus"),
        ({"ray": True, "ray_num_cpus": float("nan")}, "ray_num_cpus"),
        ({"replicas": 2}, "Add --ray"),
        ({"ray_num_cpus": 2.0}, "Add --ray"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BatchConfig(**options)


def test_ray_s_options_are_taken_with_ray():
    assert BatchConfig(ray=True, replicas=2, ray_num_cpus=0.5).replicas == 2
