"""Structured outputs as grammars: checked, compiled in bounds, and applied to token ids."""
