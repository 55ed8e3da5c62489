"""Modules, batches, new tensors and parameters of FSDP, put on the workers of a mesh."""
