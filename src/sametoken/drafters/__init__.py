"""What proposes tokens for the target, one file per method."""
