"""Running steps: launchers, CUDA graphs, logits processing, streams, and asynchronous output."""
