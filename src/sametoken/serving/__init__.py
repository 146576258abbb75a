"""The engine behind a server: its process, the client of that process, and what serves others."""
