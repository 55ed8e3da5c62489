"""Replay of an actor: its messages are kept in a file, from which the actor runs again, alone in one process."""
