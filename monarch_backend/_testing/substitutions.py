"""Attributes of modules that a simulation replaces while it runs: random numbers, limits of the router, the fault hook.

All other parts are replaced through interfaces: Links, Clock, the progress loop, the spawner, `start_runner`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import monarch_backend.actor as public
from monarch_backend._actor import actor_mesh_owner, context, current_runtime
from monarch_backend._actor.calls import codec
from monarch_backend._actor.processes import start as process_start
from monarch_backend._actor.sigint import Interrupts
from monarch_backend._mesh import proc_mesh
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.rank_text import ranks_in_words
from monarch_backend._transport.local import tuning as router_tuning


@functools.lru_cache(maxsize=4096)
def _one_rank_in_words(extent: Extent, rank: int) -> str:
    return ranks_in_words(extent, [rank])


def _ranks_in_words(extent: Extent, ranks: Collection[int]) -> str:
    """Cache the names of single ranks: each of n processes names all n, and a simulation has all of them."""
    return _one_rank_in_words(extent, *ranks) if len(ranks) == 1 else ranks_in_words(extent, ranks)


def _pid_here() -> int:
    running = current_runtime._program
    return running.pid if running is not None else 0


def seeded_secrets(rng: random.Random) -> SimpleNamespace:
    """Replace `secrets` for names of processes and actors, with numbers from the seed."""
    return SimpleNamespace(randbits=rng.getrandbits, token_hex=lambda count: rng.randbytes(count).hex())


@contextlib.contextmanager
def replaced(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of modules and classes, and restore them at the end."""
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
    """Restore the handler of Ctrl-C at the end: a simulated program replaces it when it waits."""
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
    """Draw all random numbers from ``rng``, and set constants of the router from ``tuning``."""
    secrets = seeded_secrets(rng)
    changes: list[tuple[Any, str, Any]] = [
        (actor_mesh_owner, "secrets", secrets),
        (process_start, "secrets", secrets),
        (codec, "getpid", _pid_here),
        (public, "unhandled_fault_hook", on_fault),
        (current_runtime, "_program", None),
        (proc_mesh, "ranks_in_words", _ranks_in_words),
        *((router_tuning, name, value) for name, value in tuning.items() if value is not None),
    ]
    runner, message = context.runner.set(None), context.message.set(None)
    try:
        with kept_handler(), replaced(changes):
            yield
    finally:
        context.message.reset(message)
        context.runner.reset(runner)


@contextlib.contextmanager
def logged_errors(texts: list[str]) -> Iterator[None]:
    """Append errors that monarch_backend logs to ``texts``."""
    log = logging.getLogger("monarch_backend")
    collector = logging.Handler(logging.ERROR)
    collector.emit = lambda record: texts.append(collector.format(record))  # type: ignore[method-assign]
    log.addHandler(collector)
    try:
        yield
    finally:
        log.removeHandler(collector)
