"""Latent attention (MLA): its types, its operations in plain PyTorch, and its Triton kernels."""
