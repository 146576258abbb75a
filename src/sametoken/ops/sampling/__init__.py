"""Logits rules, truncation (top-k, top-p, min-p) and keyed sampling."""
