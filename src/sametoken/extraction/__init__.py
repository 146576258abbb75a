"""Extraction of hidden states from a running engine, to train drafters."""
