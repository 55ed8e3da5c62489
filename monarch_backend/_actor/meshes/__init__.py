"""Actor meshes: references, the state that references share, and actors with a name."""
