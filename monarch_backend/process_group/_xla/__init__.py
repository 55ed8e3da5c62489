"""Collectives of XLA tensors."""
