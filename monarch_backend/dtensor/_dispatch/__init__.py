"""What happens to an operation on DTensors before it is sent to workers."""
