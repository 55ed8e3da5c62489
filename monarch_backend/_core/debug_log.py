"""Lines that explain choices, on standard error. Written only with MONARCH_DEBUG=1."""

from __future__ import annotations

import sys

from monarch_backend._core import env


def is_enabled() -> bool:
    """Whether MONARCH_DEBUG is 1 at this moment. Raises ValueError for a bad value."""
    return bool(env.get("MONARCH_DEBUG"))


def write(text: str) -> None:
    """Write the line ``text`` if the debug log is enabled, in one write: processes share a terminal."""
    if is_enabled():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
