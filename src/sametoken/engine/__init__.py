"""The engine: building it, its loop, and processing of inputs and outputs."""
