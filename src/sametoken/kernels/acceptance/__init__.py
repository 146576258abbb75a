"""Synthetic acceptance: how many drafts are accepted, drawn by seed and position."""
