"""Model families, one file each, their registry, draft heads, and checkpoint loading."""
