"""``/v1/responses``: OpenAI's Responses API over conversations; nothing is stored."""
