"""Channels between processes: frames, rings in shared memory, serialization. Knows nothing of actors or meshes."""
