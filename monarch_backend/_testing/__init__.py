"""Seeded simulation of many processes in one thread. The public names are in monarch_backend.testing."""
