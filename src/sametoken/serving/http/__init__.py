"""The HTTP server: OpenAI's API, metrics and a page, over the async engine."""
