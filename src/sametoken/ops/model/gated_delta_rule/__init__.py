"""Gated DeltaNet as a recurrent rule."""
