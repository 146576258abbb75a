"""The gated delta rule: one row updates a slot's state and reads it."""
