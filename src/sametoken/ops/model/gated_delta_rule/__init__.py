"""Gated DeltaNet as a recurrent rule: short convolution, gates and the gated delta rule."""
