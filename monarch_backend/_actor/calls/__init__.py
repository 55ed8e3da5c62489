"""Calls at the caller: endpoints, encoding, pending replies, futures and ports."""
