"""Offline batches: a file of requests in, a file of results out, in OpenAI's batch format."""
