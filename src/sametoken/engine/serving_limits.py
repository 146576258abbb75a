"""What a server bounds, each option defined once here."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.config import option
from sametoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Bounds of an engine that serves. A restarted engine process keeps them.

    Raises:
        ConfigError: a value is impossible on its face.
    """

    max_waiting: int = option(1024, "completions that may wait for a place, beyond those that run")
    max_waiting_tokens: int = option(2**20, "prompt tokens that may wait in all")
    shadow_audit_rate: float = option(
        0.0, "share of finished requests replayed without speculation in idle time, 0..1"
    )
    max_restarts: int = option(3, "restarts of a dead engine process within restart_window_s")
    restart_window_s: float = option(300.0, "seconds over which restarts are counted")
    restart_backoff_s: float = option(
        0.5, "seconds before the first restart of a window; doubled at each further one"
    )
    step_timeout_s: float = option(
        300.0, "seconds after which a step is hung: the engine is killed and restarted; 0: never"
    )

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_waiting_tokens", "max_restarts"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}={value!r} is not possible", "use 0 or more")
        if not 0 <= self.shadow_audit_rate <= 1:
            raise ConfigError(
                f"shadow_audit_rate={self.shadow_audit_rate} is not possible",
                "use a number from 0 to 1",
            )
        for name in ("restart_window_s", "restart_backoff_s", "step_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not possible", "use 0 seconds or more"
                )
