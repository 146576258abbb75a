"""Keyed sampling: the token at a position is a function of its logits, the seed, the position."""
