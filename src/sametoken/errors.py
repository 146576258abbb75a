"""Every error that a user can meet, each naming its cause and its remedy.

Nothing else in the package is imported here, so that any module may raise them.
"""

from __future__ import annotations

import reprlib

#: Characters of a user's value that a message repeats, and characters of a whole cause.
MAX_SHOWN = 200
MAX_CAUSE = 1000


class _Repr(reprlib.Repr):
    """Looks at the beginning of long values only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        """Python writes out no integer of more than 4300 digits."""
        return repr(x) if x.bit_length() <= MAX_SHOWN else f"an integer of {x.bit_length()} bits"


_repr = _Repr().repr


def shown(value: object) -> str:
    """A user's value as messages repeat it: at most ``MAX_SHOWN`` characters."""
    try:
        return clipped(_repr(value), MAX_SHOWN)
    except Exception:
        # A value of any class: what its methods raise is its own affair.
        return f"a value of type {type(value).__name__}"


def clipped(text: str, most: int) -> str:
    """The text, without its middle if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail - 3]}...{text[-tail:]}"


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
    """One request is invalid; the engine goes on with the others.

    What a message repeats of the request is bounded: ``MAX_CAUSE`` characters.
    """

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(clipped(cause, MAX_CAUSE), clipped(remedy, MAX_CAUSE))


class CheckpointError(SametokenError):
    """A checkpoint is missing, truncated, corrupt, or holds the wrong tensors."""


class UnsupportedError(SametokenError):
    """The request is sound but this engine does not implement it."""

    exit_code = 3


class DrafterMismatchError(SametokenError, ValueError):
    """A drafter does not fit the target (vocabulary, hidden size, layers)."""


class NumericalError(SametokenError):
    """The model produced NaN logits for one request; that request fails alone."""


class StructuredOutputError(SametokenError):
    """A request's grammar cannot be followed any further; the request fails alone."""


class EngineDeadError(SametokenError):
    """The engine stopped after an internal failure; unfinished requests are lost."""


class EngineRestartingError(EngineDeadError):
    """The engine stopped and is being started again; send the request a little later."""


class DrainingError(SametokenError):
    """The server lets its requests finish and takes no new ones."""


class OverloadedError(SametokenError):
    """Too many requests wait already; nothing of this one was begun.

    Args:
        cause: which bound was met.
        remedy: what the user can do about it.
        retry_after_s: when there may be room again, in seconds; an estimate.
    """

    def __init__(self, cause: str, remedy: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(cause, remedy)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[OverloadedError], tuple[str, str, float]]:  # type: ignore[override]
        """See ``SametokenError``."""
        return (type(self), (self.cause, self.remedy, self.retry_after_s))


class InvariantError(SametokenError):
    """A rule of the design was broken: a defect of the engine, never of its user."""


class InFlightError(InvariantError):
    """The host asked for an exact length while steps that change it are in flight."""


class StaleInputsError(InvariantError):
    """A step was answered with the result of another one."""
