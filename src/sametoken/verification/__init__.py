"""Keyed sampling, logits processing, and the judgement of drafts."""
