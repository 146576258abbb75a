"""A step's verdict in the one tensor that travels to the host."""

#: What may be wrong with a window: nothing, NaN in its logits, or no token that is allowed; that
#: and what lies above says why (``core.structured_outputs.Stuck``).
SOUND, HAS_NAN, NO_TOKEN = 0, 1, 2
