"""The server beyond one machine: replicas of the engine on Ray."""
