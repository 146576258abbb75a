"""Hidden states of a running engine, recorded for training drafters."""
