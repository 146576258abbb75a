"""Operations and their references; one backend per device."""
