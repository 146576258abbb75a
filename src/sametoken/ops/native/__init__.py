"""CPU kernels in C, compiled on first use for the machine."""
