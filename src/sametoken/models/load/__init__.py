"""Checkpoints on disk: formats, settings, tensors to packed weights."""
