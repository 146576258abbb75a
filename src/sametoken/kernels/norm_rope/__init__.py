"""RMS norms, rotary embedding, and the KV write."""
