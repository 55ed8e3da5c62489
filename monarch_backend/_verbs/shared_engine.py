"""The verbs engine of this process: one for all that use NICs here, so that a device is opened and memory locked once.

A user is known by the type of its peers' names: who gets a connection to a peer is a matter of that type. What an
engine does is verbs/'s, what a user does with it its own.
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
    """The engine, for a user whose peers' names are of this type; ``dial`` as Engine has it. Opens nothing."""
    global _engine
    with _lock:
        if kind in _dials:
            raise RuntimeError(f"the verbs engine is in use for peers named by {kind.__name__} already: give it back")
        if _engine is None:
            _engine = Engine(_dial)
        _dials[kind] = dial
        return _engine


def give_back(kind: type) -> bool:
    """This user needs it no more; True if it was the last, and the engine is closed.

    Where it stays open, regions and connections that are the user's own are for the user to end.
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
        raise VerbsError("nobody here has to do with it any more")
    dial(peer)


def _close() -> None:
    for kind in list(_dials):
        give_back(kind)


def _in_forked_child() -> None:
    global _engine, _lock
    _engine, _lock = None, threading.Lock()  # the parent's, with its devices
    _dials.clear()


atexit.register(_close)
fork.register(fork.Step.SHARED_ENGINE, after_in_child=_in_forked_child)
