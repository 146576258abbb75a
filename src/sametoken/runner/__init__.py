"""The step and its graphs, streams, and results on their way to the host."""
