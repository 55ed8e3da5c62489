"""What a simulation replaces while it runs, and puts back: chance, numbers of the router, faults, Ctrl-C.

Everything else that it stands on is a seam of the code itself: Links, Clock, the pump, the spawner, `run_cell`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import monarch_backend.actor as public
from monarch_backend._actor import actor_mesh_owner, codec, context, ownership, runtime
from monarch_backend._actor.sigint import Interrupts
from monarch_backend._mesh import proc_mesh
from monarch_backend._mesh.extent import Extent, ranks_in_words
from monarch_backend._transport.local import tuning as router_tuning


@functools.lru_cache(maxsize=4096)
def _one_rank_in_words(extent: Extent, rank: int) -> str:
    return ranks_in_words(extent, [rank])


def _ranks_in_words(extent: Extent, ranks: Collection[int]) -> str:
    """Each of n processes names all n: in one thread that is n times too much."""
    return _one_rank_in_words(extent, *ranks) if len(ranks) == 1 else ranks_in_words(extent, ranks)


def _pid_here() -> int:
    running = runtime._program
    return running.pid if running is not None else 0


class Secrets:
    """The part of `secrets` that names processes and actors, from the seed."""

    def __init__(self, rng: random.Random) -> None:
        self.randbits = rng.getrandbits

    def token_hex(self, count: int) -> str:
        """So many random bytes."""
        return self.randbits(8 * count).to_bytes(count, "little").hex()


@contextlib.contextmanager
def replaced(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Until the end, these attributes of modules and classes have other values."""
    before = [(where, name, getattr(where, name)) for where, name, _ in changes]
    for where, name, value in changes:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)


@contextlib.contextmanager
def kept_handler() -> Iterator[None]:
    """Ctrl-C, which is the simulated programs' once one of them waits, is at the end whose it was."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        ours = isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), Interrupts)
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def simulated_seams(
    rng: random.Random, tuning: Mapping[str, int | None], on_fault: Callable[[Any], object]
) -> Iterator[None]:
    """Until the end, nothing is left to chance but ``rng``; ``tuning`` are constants of the router."""
    secrets = Secrets(rng)
    changes: list[tuple[Any, str, Any]] = [
        (actor_mesh_owner, "secrets", secrets),
        (ownership, "secrets", secrets),
        (codec, "getpid", _pid_here),
        (public, "unhandled_fault_hook", on_fault),
        (runtime, "_program", None),
        (proc_mesh, "ranks_in_words", _ranks_in_words),
        *((router_tuning, name, value) for name, value in tuning.items() if value is not None),
    ]
    cell, message = context.cell.set(None), context.message.set(None)
    try:
        with kept_handler(), replaced(changes):
            yield
    finally:
        context.message.reset(message)
        context.cell.reset(cell)


class _Collector(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(self.format(record))


@contextlib.contextmanager
def logged_errors(texts: list[str]) -> Iterator[None]:
    """Until the end, what monarch_backend logs as an error is collected here."""
    log = logging.getLogger("monarch_backend")
    collector = _Collector(texts)
    log.addHandler(collector)
    try:
        yield
    finally:
        log.removeHandler(collector)
