"""Registry of fork handlers. They run in the order of `Step`, whatever the order of imports.

The package calls ``os.register_at_fork`` here and nowhere else.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

Handler = Callable[[], Any]


class Step(enum.Enum):
    """Steps of a fork, in the order in which they run in the parent and in the child afterwards.

    Before the fork they run in reverse order, so that a step's locks are held while earlier steps run.
    """

    LOG_COLLECTORS = "locks and pipes of log collectors"
    """The first step: its locks are taken last, and so are held for the shortest time."""
    RECORDING = "recording area of the processes that this one starts"
    SPAWNERS = "channels to fork servers"
    RUNTIME = "the actor runtime, with the transfer engine of registered memory"
    CANCEL_SIGNAL = "handler of the signal that interrupts blocking code"
    SIGTERM = "handler that ignores SIGTERM"
    COMMAND_STREAMS = "commands from a controller to the workers of a device mesh"
    VERBS_ENGINES = "devices and queue pairs"
    """Before the users of engines drop them: an object that is destroyed in the child ends the parent's."""
    SHARED_ENGINE = "the engine that all users of NICs in a process share"
    PEER_READS = "reads of point-to-point messages by NICs"
    RDMA_ELIGIBILITY = "cached answer whether NICs may be used"
    CALLBACK_THREADS = "threads of completion callbacks"
    GROUP_WATCH = "thread that watches groups of several hosts"
    SHARED_MEMORY = "shared memory and the progress thread of CPU collectives"


_ORDER = tuple(Step)


class _Phase:
    """Handlers of one phase of a fork, by step. Has no lock: another thread could hold it at the fork."""

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._handlers: dict[Step, dict[int, Callable[[], Handler | None]]] = {step: {} for step in _ORDER}

    def add(self, step: Step, handler: Handler | None) -> None:
        if handler is None:
            return
        handlers, key = self._handlers[step], next(self._keys)
        if isinstance(handler, types.MethodType):
            handlers[key] = weakref.WeakMethod(handler, lambda _: handlers.pop(key, None))
        else:
            handlers[key] = lambda: handler

    def run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            for find in list(self._handlers[step].values()):
                try:
                    if (handler := find()) is not None:
                        handler()
                except BaseException:  # as in Python: the fork and the other handlers continue
                    _report(step)


def _report(step: Step) -> None:
    with contextlib.suppress(Exception):
        sys.stderr.write(f"monarch_backend: a fork handler failed (pid {os.getpid()}, step {step.name})\n")
        traceback.print_exc()


_before, _after_in_parent, _after_in_child = _Phase(), _Phase(), _Phase()


def register(
    step: Step,
    *,
    before: Handler | None = None,
    after_in_parent: Handler | None = None,
    after_in_child: Handler | None = None,
) -> None:
    """Call the handlers at each fork of this process.

    A bound method is kept by a weak reference, and is dropped with its object. Other callables are kept. An exception
    of a handler is printed; the handlers after it run all the same.
    """
    _before.add(step, before)
    _after_in_parent.add(step, after_in_parent)
    _after_in_child.add(step, after_in_child)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _before.run(reversed(_ORDER)),
        after_in_parent=lambda: _after_in_parent.run(_ORDER),
        after_in_child=lambda: _after_in_child.run(_ORDER),
    )
