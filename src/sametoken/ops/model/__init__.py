"""Operations of a model: products, attention, norms, experts, recurrent rules."""
