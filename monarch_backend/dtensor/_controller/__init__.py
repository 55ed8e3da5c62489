"""The controller's side of DTensors: meshes, remote tensors, commands to workers."""
