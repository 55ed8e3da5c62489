"""Meshes of hosts and processes, and their shapes. The public names are in monarch_backend.mesh and .actor."""
