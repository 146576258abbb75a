"""Mamba-2 without its projections: sizes, row function and kernels."""
