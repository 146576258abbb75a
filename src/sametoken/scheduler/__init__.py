"""The scheduler: plans every step on the host, without torch."""
