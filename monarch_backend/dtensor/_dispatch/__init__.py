"""Dispatch of operations on DTensors, up to the records for workers."""
