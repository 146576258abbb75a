"""Every error that a user can meet, each naming its cause and its remedy.

Nothing else in the package is imported here, so that any module may raise them.
"""

from __future__ import annotations


class SametokenError(Exception):
    """Base of all typed errors.

    Args:
        cause: what is wrong, naming the file, option, or value.
        remedy: what the user can do about it.
    """

    exit_code = 2

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause}. {remedy}" if remedy else cause)
        self.cause = cause
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[SametokenError], tuple[str, str]]:
        """Pickle by cause and remedy, so that errors cross process borders whole."""
        return (type(self), (self.cause, self.remedy))


class ConfigError(SametokenError, ValueError):
    """An engine option is impossible, unknown, or contradicts another."""


class RequestError(SametokenError, ValueError):
    """One request is invalid; the engine goes on with the others."""


class CheckpointError(SametokenError):
    """A checkpoint is missing, truncated, corrupt, or holds the wrong tensors."""


class UnsupportedError(SametokenError):
    """The request is sound but this engine does not implement it."""

    exit_code = 3


class DrafterMismatchError(SametokenError, ValueError):
    """A drafter does not fit the target (vocabulary, hidden size, layers)."""


class NumericalError(SametokenError):
    """The model produced NaN logits for one request; that request fails alone."""


class EngineDeadError(SametokenError):
    """The engine stopped after an internal failure; unfinished requests are lost."""


class InvariantError(SametokenError):
    """A rule of the design was broken: a defect of the engine, never of its user."""


class InFlightError(InvariantError):
    """The host asked for an exact length while steps that change it are in flight."""


class StaleInputsError(InvariantError):
    """A launch was given inputs that were staged for another step."""
