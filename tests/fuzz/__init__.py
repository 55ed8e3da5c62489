"""Coverage-guided fuzzing of what reads other hosts' and processes' bytes; ``make fuzz``, or `__main__.py` by hand.

A target is a module with ``SEEDS`` and ``one(data)``, which fails on what must not happen. Targets import nothing that
imports torch, and not atheris: the ordinary run replays the corpus through them.
"""
