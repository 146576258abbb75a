"""Mamba-2 as a recurrent rule."""
