"""Transfers: the engine that runs them, their state, their futures, and a cache of their plans."""
