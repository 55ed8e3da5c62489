"""The verbs engine that all users of NICs in this process share, so that devices are opened and memory locked once.

The type of its peers' names identifies a user. This type selects the user that connects to a peer.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

from monarch_backend._core import fork
from monarch_backend._verbs import Engine, VerbsError

_lock = threading.Lock()
_engine: Engine | None = None
_dials: dict[type, Callable[[Any], None]] = {}


def borrow(kind: type, dial: Callable[[Any], None]) -> Engine:
    """Return the engine for a user whose peers' names are of this type. ``dial``: see Engine. Opens nothing."""
    global _engine
    with _lock:
        if kind in _dials:
            raise RuntimeError(f"the verbs engine is in use for peers named by {kind.__name__} already: give it back")
        if _engine is None:
            _engine = Engine(_dial)
        _dials[kind] = dial
        return _engine


def give_back(kind: type) -> bool:
    """End a user's use of the engine; True if it was the last, and the engine is closed.

    If the engine stays open, the user must close its own regions and connections.
    """
    global _engine
    with _lock:
        if _dials.pop(kind, None) is None or _dials:
            return False
        engine, _engine = _engine, None
    if engine is not None:
        engine.close()
    return True


def _dial(peer: Any) -> None:
    dial = _dials.get(type(peer))
    if dial is None:
        raise VerbsError("no user in this process needs it any more")
    dial(peer)


def _close() -> None:
    for kind in list(_dials):
        give_back(kind)


def _in_forked_child() -> None:
    global _engine, _lock
    _engine, _lock = None, threading.Lock()  # they belong to the parent, with its devices
    _dials.clear()


atexit.register(_close)
fork.register(fork.Step.SHARED_ENGINE, after_in_child=_in_forked_child)
