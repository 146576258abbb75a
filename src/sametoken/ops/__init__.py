"""Operations and their references: models, steps, lookup, sampling; one backend per device."""
