"""The engine behind a server: its process, that process's client, HTTP, batch and Ray."""
