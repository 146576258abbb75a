"""The host's vocabulary: plain Python values that every layer above may use."""
