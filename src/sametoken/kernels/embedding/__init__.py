"""Embedding lookup on the device."""
