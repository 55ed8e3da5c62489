"""The runtime of this process: started at its first use, dropped in a fork.

runtime.py starts it. Other modules of this package find it here, so that they need no import of runtime.py.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from monarch_backend._core.extension_points import extension

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

_program: Runtime | None = None
_forked_from: frozenset[str] = frozenset()
_guard = threading.Lock()


def program() -> Runtime:
    """Return the runtime of this process. The first call starts it."""
    if _program is None:
        with _guard:
            if _program is None:
                extension("runtime").start_main()
    assert _program is not None
    return _program


def started() -> Runtime | None:
    """Return the runtime of this process, None if it has not started."""
    return _program


def set_program(runtime: Runtime) -> None:
    global _program
    _program = runtime


def drop_program() -> Runtime | None:
    """Return the runtime of the parent, in a fork, and let the next call of `program` start another one."""
    global _program, _forked_from
    dropped, _program = _program, None
    if dropped is not None:
        _forked_from |= {dropped.router.token, *dropped.router.peers}
    return dropped


def is_of_parent(token: str) -> bool:
    """Return whether the token is of a process that only the parent of this fork knows."""
    return token in _forked_from and (_program is None or token not in _program.router.peers)
