"""Extents and slicing; host meshes and process meshes; spawning, bootstrap, logs."""
