"""Destruction of queue pairs and registrations, also where the device refuses it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from monarch_backend import _native

log = logging.getLogger("monarch_backend")


class Closable(Protocol):
    def close(self) -> None:
        """Raises OSError."""


def destroy(part: Closable, what: str, device: str) -> bool:
    """Close a resource. Return False if its device refuses, as one that was removed or reset.

    Then the resource is kept until the process ends. The device may still use it, and its destructor would try again at
    any point of other code.
    """
    try:
        part.close()
    except OSError as error:
        log.warning("verbs: %s of %s cannot be destroyed, and is left as it is: %s", what, device, error)
        _native.keep_for_ever(part)
        return False
    return True


def close_each(parts: Iterable[Any], close: Callable[[Any], None]) -> None:
    """Close all in reverse order; raises the OSError of one that fails, after the others."""
    with contextlib.ExitStack() as each:
        for part in parts:
            each.callback(close, part)
