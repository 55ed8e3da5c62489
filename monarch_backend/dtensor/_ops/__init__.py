"""Operations with a rule of their own: sharding rules, attention, normalisation, optimizers."""
