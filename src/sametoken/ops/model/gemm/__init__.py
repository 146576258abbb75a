"""Matrix products of activations with packed weights, and embedding lookup."""
