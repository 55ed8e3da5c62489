"""Coverage-guided fuzzing of the decoders of bytes from other hosts and processes: ``make fuzz``, or `__main__.py`.

A target is a module with ``SEEDS`` and ``one(data)``, which raises on unexpected behaviour. Targets import neither
torch nor atheris, so that the ordinary test run can replay the corpus through them.
"""
