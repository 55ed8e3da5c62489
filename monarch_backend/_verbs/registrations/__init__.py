"""Registrations of memory with a NIC: their cache, and GPU memory."""
