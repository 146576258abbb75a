"""The HTTP server: OpenAI's and Anthropic's APIs, metrics and a status page, over ``AsyncLLM``."""
