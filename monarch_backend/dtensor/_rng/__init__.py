"""Random numbers that are those of a single process."""
