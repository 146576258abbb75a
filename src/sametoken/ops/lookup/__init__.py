"""Search in a slot's tokens: prompt lookup and suffix decoding."""
