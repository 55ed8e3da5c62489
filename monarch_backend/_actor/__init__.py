"""Actors: classes, endpoints, calls, futures, supervision. The public names are in monarch_backend.actor."""
