"""Captured steps: from torch.compile's graph to commands of workers."""
