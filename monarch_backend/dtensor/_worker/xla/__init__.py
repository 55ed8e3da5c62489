"""torch_xla on the workers of a controller."""
