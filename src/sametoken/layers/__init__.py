"""Modules of a decoder layer, over explicit operations."""
