"""Options of a batch. Imports neither torch nor Ray, so that CLI help stays cheap."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.config import option
from sametoken.errors import ConfigError
from sametoken.types.option_values import require_limits


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Options of a batch run.

    Raises:
        ConfigError: a value is impossible, or was given without Ray.
    """

    served_model_name: tuple[str, ...] = option((), "name that requests may give; may be repeated")
    concurrency: int = option(
        0, "lines that run at once on one engine; 0: max_num_seqs", limits=(0, 2**31)
    )
    max_line_bytes: int = option(
        16 * 2**20, "longest line; a longer one gets an error", limits=(1, 2**40)
    )
    ray: bool = option(False, "run engines on a Ray cluster")
    replicas: int = option(1, "with ray: engines to run", limits=(1, 10_000))
    ray_num_cpus: float = option(
        1.0, "with ray: CPU cores that Ray sets aside for each engine", limits=(0.0, 1024.0)
    )

    def __post_init__(self) -> None:
        require_limits(self)
        if not self.ray and (self.replicas, self.ray_num_cpus) != (1, 1.0):
            raise ConfigError("options of Ray were given", "add --ray, or leave them out")
