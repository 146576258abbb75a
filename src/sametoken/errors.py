"""Every error that a user can see, each with its cause and its remedy.

This module imports nothing else of the package, so that any module can raise them.
"""

from __future__ import annotations

import reprlib

#: Maximum characters of a user's value in a message, and of a whole cause.
MAX_SHOWN = 200
MAX_CAUSE = 1000


class _Repr(reprlib.Repr):
    """``repr`` that reads only the beginning of long values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        """Abbreviate: Python refuses to print integers of more than 4300 digits."""
        return repr(x) if x.bit_length() <= MAX_SHOWN else f"an integer of {x.bit_length()} bits"


_repr = _Repr().repr


def shown(value: object) -> str:
    """A user's value for a message, at most ``MAX_SHOWN`` characters."""
    try:
        return clipped(_repr(value), MAX_SHOWN)
    except Exception:
        # The methods of an arbitrary class may raise anything.
        return f"a value of type {type(value).__name__}"


def clipped(text: str, most: int) -> str:
    """The text, with its middle elided if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail - 3]}...{text[-tail:]}"


def in_words(error: Exception) -> str:
    """What an error says; one of the system without its number and its path."""
    words = error.strerror if isinstance(error, OSError) else None
    return words[:1].lower() + words[1:] if words else str(error)


class SametokenError(Exception):
    """Base of all typed errors.

    Args:
        cause: the problem, with the name of the file, option, or value.
        remedy: what the user can do about it; the message has it as a sentence of its own.
    """

    exit_code = 2

    def __init__(self, cause: str, remedy: str = "") -> None:
        sentence = remedy[:1].upper() + remedy[1:]
        super().__init__(f"{cause.removesuffix('.')}. {sentence}" if remedy else cause)
        self.cause = cause
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[SametokenError], tuple[str, str]]:
        """Pickle by cause and remedy, so that errors keep both across processes."""
        return (type(self), (self.cause, self.remedy))


class ConfigError(SametokenError, ValueError):
    """An engine option is impossible, unknown, or contradicts another."""


class RequestError(SametokenError, ValueError):
    """One request is invalid; the engine continues with the others.

    Cause and remedy are clipped to ``MAX_CAUSE`` characters each.

    Args:
        cause, remedy: see ``SametokenError``.
        param: the parameter that is to blame, where there is one.
        code: OpenAI's name of the cause, where clients know it. Neither crosses processes.
    """

    def __init__(
        self, cause: str, remedy: str = "", *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(clipped(cause, MAX_CAUSE), clipped(remedy, MAX_CAUSE))
        self.param = param
        self.code = code


def require_unicode(name: str, value: str | tuple[str, ...], param: str | None = None) -> None:
    """Refuse a text, or several, that UTF-8 cannot write.

    Raises:
        RequestError: one holds a lone surrogate.
    """
    try:
        "".join(value).encode()
    except UnicodeEncodeError as error:
        cause = f"{name}={shown(value)} holds a lone surrogate"
        raise RequestError(cause, "give valid Unicode text", param=param) from error


class CheckpointError(SametokenError):
    """A checkpoint is missing, truncated, corrupt, or holds the wrong tensors."""


class WeightUpdateError(SametokenError, ValueError):
    """New weights do not fit the running model, or do not come; it keeps the old ones."""


class UnsupportedError(SametokenError):
    """A valid model, option or request that this engine does not implement."""

    exit_code = 3


class DrafterMismatchError(SametokenError, ValueError):
    """A drafter does not fit the target (vocabulary, hidden size, layers)."""


class NumericalError(SametokenError):
    """The model produced NaN logits for one request; only that request fails."""


class StructuredOutputError(SametokenError):
    """No token satisfies a request's grammar, or its masks failed; only that request fails."""


class EngineDeadError(SametokenError):
    """The engine stopped after an internal failure; unfinished requests are lost."""


class EngineRestartingError(EngineDeadError):
    """The engine stopped and is being restarted; retry the request later."""


class DrainingError(SametokenError):
    """The server is draining: it finishes its requests and accepts no new ones."""


class OverloadedError(SametokenError):
    """Too many requests are waiting; this one was not started.

    Args:
        cause: the limit that was reached.
        remedy: what the user can do about it.
        retry_after_s: estimated seconds until a retry may succeed.
    """

    def __init__(self, cause: str, remedy: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(cause, remedy)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[OverloadedError], tuple[str, str, float]]:  # type: ignore[override]
        """See ``SametokenError``."""
        return (type(self), (self.cause, self.remedy, self.retry_after_s))


class InvariantError(SametokenError):
    """An internal invariant was violated: a bug in the engine, never a user's error."""


class InFlightError(InvariantError):
    """The host read an exact length while steps that change it are in flight."""


class StaleInputsError(InvariantError):
    """The result of a step belongs to another step."""
