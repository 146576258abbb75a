"""Bounded reads of untrusted files and JSON, atomic writes, and child processes."""
