"""Causal attention over paged KV."""
