"""Execution of actors in their process: runners, message queues, replies, and interruption of running code."""
