"""Grammar masks, log-probabilities, and checks on a request's logits options."""
