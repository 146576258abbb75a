"""Operations on logits: keyed sampling, truncation, and rules of requests."""
