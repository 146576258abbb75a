"""How a server's weights may change over HTTP. Imports no torch, so that CLI help stays cheap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sametoken.errors import ConfigError, shown
from sametoken.types.option_values import (
    from_json,
    option,
    require_choices,
    require_limits,
    require_types,
)
from sametoken.types.weight_updates import GLOO, IPC, NCCL

FILES = "files"
_NAME = "weight_transfer_config"


@dataclass(frozen=True, slots=True)
class WeightTransferConfig:
    """The keys of ``weight_transfer_config``.

    Raises:
        ConfigError: a value is impossible, or two contradict each other.
    """

    backend: str = option(
        FILES,
        "how weights come: files of a directory, a trainer's process group, or its memory",
        choices=(FILES, GLOO, NCCL, IPC),
    )
    directory: str | None = option(None, "where updates by files are; no others are read")
    timeout: float = option(
        300.0, "seconds to wait for a trainer's process group", limits=(0.001, 86400.0)
    )

    def __post_init__(self) -> None:
        require_types(self, f"{_NAME}.")
        require_choices(self)
        require_limits(self)
        if (self.backend == FILES) != (self.directory is not None):
            raise ConfigError(
                f"{_NAME} of backend {self.backend!r} has directory={shown(self.directory)}",
                f"give a directory with the backend {FILES!r}, and with no other",
            )
        if self.directory is not None and not Path(self.directory).is_dir():
            raise ConfigError(
                f"{_NAME} names {shown(self.directory)}, which is no directory", "make it first"
            )

    @classmethod
    def parse(cls, text: str) -> WeightTransferConfig:
        """Read the option's JSON; errors as in ``from_json``."""
        return from_json(cls, text, _NAME, '{"backend": "files", "directory": "/dev/shm/weights"}')
