"""Collectives of ranks on one host over shared memory."""
