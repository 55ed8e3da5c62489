"""How many steps are compared between ranks."""

WINDOW = 20
"""Steps whose median is the step time of a rank."""

MIN_STEPS = 5
"""Steps that a rank must have made before it is compared with others."""
