"""Plans from host memory and verdicts to it, by kernels inside a captured step."""
