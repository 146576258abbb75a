"""Modules of a decoder layer, over explicit kernels."""
