"""What requests ask of their logits: masks, log-probabilities, and their limits."""
