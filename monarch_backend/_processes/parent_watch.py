"""End of a process with its parent, on systems where the kernel does not see to that.

The parent has a pipe to which it never writes. Its children inherit the read end, and a thread of each waits for the
end of the pipe, which is that of the parent. Code of the process that keeps the interpreter's lock delays this. A
process of a mesh also ends with its controller by a thread that needs no lock (`Host.die_with_peer`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from monarch_backend._core import fork

_pipe: tuple[int, int] | None = None
_outlives = False


def descriptor() -> int:
    """Return the descriptor that children of this process have to inherit, for their `start`. It is made once."""
    global _pipe
    if _pipe is None:
        _pipe = os.pipe()
        fork.register(fork.Step.SPAWNERS, after_in_child=_forget)
    return _pipe[0]


def _forget() -> None:
    """Close the pipe in a fork of the parent, which must not keep it open."""
    global _pipe
    if _pipe is not None:
        for end in _pipe:
            os.close(end)
        _pipe = None


def start(pipe: int) -> None:
    """Kill this process at the end of its parent. ``pipe``: the inherited descriptor."""
    os.set_inheritable(pipe, False)
    threading.Thread(target=_watch, args=(pipe,), name="monarch-parent", daemon=True).start()


def outlive_parent() -> None:
    global _outlives
    _outlives = True


def _watch(pipe: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    os.read(pipe, 1)
    if _outlives:
        return
    if os.getpgrp() == os.getpid():  # with its descendants, which have lost their controller, too
        with contextlib.suppress(OSError):
            os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
