"""Operations on logits: logits rules of requests, truncation (top-k, top-p, min-p), sampling."""
