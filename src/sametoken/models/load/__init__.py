"""Checkpoint formats, their settings, and reading tensors into packed weights."""
