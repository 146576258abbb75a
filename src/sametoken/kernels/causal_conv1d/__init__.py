"""The short causal convolution before the gated delta rule."""
