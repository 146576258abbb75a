"""Which experts serve a row, and the weighted sum of what they say."""
