"""Tensor parallelism: the processes that share one model."""
