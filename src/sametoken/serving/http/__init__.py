"""The HTTP server: OpenAI's API, metrics and a status page, over ``AsyncLLM``."""
