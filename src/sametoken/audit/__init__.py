"""Does speculation change a token, and why are drafts refused? For this engine and any server."""
