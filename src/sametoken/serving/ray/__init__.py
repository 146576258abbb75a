"""The server on a Ray cluster: replicas of the engine behind a gateway."""
