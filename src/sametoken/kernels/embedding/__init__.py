"""Embedding lookup on the device, and embeddings normed beside hidden states."""
