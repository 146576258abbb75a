"""Launches of splits by few programs, for kernels that run in Python.

There a program without splits takes almost as long as one with some.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

MOST = 8


def few(config: Any) -> Any:
    """A launch's configuration with few programs."""
    return replace(config, programs=min(config.programs, MOST))


def choosing(choose: Any) -> Any:
    """A module's ``choose``, with few programs."""
    return lambda *given, **named: few(choose(*given, **named))
