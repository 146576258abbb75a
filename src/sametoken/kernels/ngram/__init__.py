"""Prompt lookup: find the end of a sequence earlier in it, and copy what came next."""
