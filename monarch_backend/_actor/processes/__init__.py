"""Processes that this process owns: placement, start, readiness, exits, restarts and stop."""
