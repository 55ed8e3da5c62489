"""Operations with their own rules: sharding rules, attention, normalisation, optimizers."""
