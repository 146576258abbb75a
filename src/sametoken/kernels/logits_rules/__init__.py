"""Logits changed by token id or by history: masks, biases and penalties of each window row."""
