"""Dispatch of operations on DTensors, up to the commands for workers."""
