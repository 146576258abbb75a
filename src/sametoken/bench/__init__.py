"""Benchmarks: engines, servers under load, sweeps, reports, accuracy."""
