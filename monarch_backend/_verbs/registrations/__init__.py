"""Registrations of memory with a NIC: their cache, GPU memory, and remote keys that were withdrawn."""
