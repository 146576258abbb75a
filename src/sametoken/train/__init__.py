"""Training: draft heads, drafters and small models, for this engine and others."""
