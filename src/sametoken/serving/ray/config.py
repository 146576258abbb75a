"""Options of a Ray deployment. Imports no Ray, so that CLI help is cheap and needs no extra."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.config import option
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.types.option_values import require_limits


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Options of a Ray deployment.

    Raises:
        ConfigError: a value is impossible, or two contradict each other.
    """

    replicas: int = option(1, "engines to run, each with a device of its own", limits=(1, 10_000))
    ray_min_replicas: int = option(
        1, "fewest engines, where ray_max_replicas is given", limits=(1, 10_000)
    )
    ray_max_replicas: int = option(
        0, "most engines: Ray follows the load; 0: always replicas", limits=(0, 10_000)
    )
    ray_target_ongoing_requests: int = option(
        0, "requests of an engine at which Ray adds another; 0: max_num_seqs", limits=(0, 2**20)
    )
    ray_upscale_delay_s: float = option(
        30.0, "seconds of load before Ray adds an engine", limits=(0.0, 86400.0)
    )
    ray_downscale_delay_s: float = option(
        600.0, "seconds of idleness before Ray ends an engine", limits=(0.0, 86400.0)
    )
    ray_num_cpus: float = option(
        1.0, "CPU cores that Ray sets aside for each engine", limits=(0.0, 1024.0)
    )
    ray_max_surge_percent: int = option(
        0,
        "engines that a rolling update may start before it ends old ones; 0: ends old ones first",
        limits=(0, 100),
    )

    def __post_init__(self) -> None:
        require_limits(self)
        if self.ray_max_replicas:
            self._check_autoscaling()

    def _check_autoscaling(self) -> None:
        if self.replicas != 1:
            raise ConfigError(
                "replicas and ray_max_replicas contradict each other",
                "give replicas for a fixed number, or ray_min_replicas and ray_max_replicas",
            )
        if self.ray_min_replicas > self.ray_max_replicas:
            raise ConfigError(
                f"ray_min_replicas={self.ray_min_replicas} is above "
                f"ray_max_replicas={self.ray_max_replicas}",
                "use min <= max",
            )


def require_ray() -> None:
    """Check early that Ray is installed.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import ray.data
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"Ray is not installed ({error})", "run pip install 'sametoken[ray]'"
        ) from error
