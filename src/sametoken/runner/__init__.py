"""The seven verbs of a step, streams, and results on their way to the host."""
