"""Frames, links and routing between the processes of one host."""
