"""A differentiable forward pass with the engine's bits, for trainers"""

from __future__ import annotations

from sametoken.exact.model import ExactModel

__all__ = ["ExactModel"]
