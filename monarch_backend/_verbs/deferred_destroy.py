"""The end of what a device made for us: of queue pairs and registrations, also where it can't be had."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from monarch_backend import _native

log = logging.getLogger("monarch_backend")


class Closable(Protocol):
    """A part of a device."""

    def close(self) -> None:
        """Raises OSError."""


def destroy(part: Closable, what: str, device: str) -> bool:
    """Close it. False if its device can't, as one that was removed or reset: then it is kept for ever, since the device
    may still have it, and its own end would try again, in the middle of anything.
    """
    try:
        part.close()
    except OSError as error:
        log.warning("verbs: %s of %s cannot be destroyed, and is left as it is: %s", what, device, error)
        _native.keep_for_ever(part)
        return False
    return True


def close_each(parts: Iterable[Any], close: Callable[[Any], None]) -> None:
    """The last one first, and all of them: raises the OSError of one that does not."""
    with contextlib.ExitStack() as each:
        for part in parts:
            each.callback(close, part)
