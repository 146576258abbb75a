"""Gradients of operations on a GPU, for `sametoken.exact`"""
