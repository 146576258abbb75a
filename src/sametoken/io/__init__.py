"""Bounded reads of untrusted files and JSON, atomic writes, journals, and child processes."""
