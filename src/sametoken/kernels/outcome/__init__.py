"""A step's verdict in the one tensor that travels to the host."""
