"""Attention over latent vectors (MLA), and products per head."""
