"""Grammar masks, log-probabilities, and what a request may ask of its logits."""
