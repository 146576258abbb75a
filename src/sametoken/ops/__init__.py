"""Operations, each with its reference, chosen once for a device."""
