"""Engines in processes of their own start quickly."""

from helpers.forks import forks

__all__ = ["forks"]
