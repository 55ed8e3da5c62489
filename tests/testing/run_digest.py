"""Digest of every event in a random world, for the test that the same seed gives the same run."""

from __future__ import annotations

import hashlib
from typing import Any

from monarch_backend.testing import Simulation


def digest_of(worlds: Any, *arguments: int) -> str:
    """Return a digest of all events in ``worlds.run(*arguments)``. ``worlds`` is a module of random worlds."""
    digest = hashlib.sha256()

    class Listening(Simulation):
        def note(self, process: Any, what: Any, event: Any = None) -> None:
            digest.update(repr((self.now, process.label, getattr(what, "label", what), event)).encode())
            super().note(process, what, event)

    ordinary, worlds.Simulation = worlds.Simulation, Listening
    try:
        worlds.run(*arguments)
    finally:
        worlds.Simulation = ordinary
    return digest.hexdigest()
