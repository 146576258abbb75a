"""Files of requests answered into files of results, in OpenAI's batch format."""
