"""Connections to peers: queue pairs in both directions, and the choice of ports."""
