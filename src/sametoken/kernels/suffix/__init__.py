"""Suffix decoding: earlier continuations of a sequence's end vote on what comes next."""
