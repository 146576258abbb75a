"""The audit: does speculation change a token, and why are drafts rejected? Engine or server."""
