"""Structured outputs as grammars: what is supported, compiled, tried before use."""
