"""The device's truth: token ids and lengths, KV memory, and a step's inputs."""
