"""Who runs in the next step, decided on the host; imports no torch."""
