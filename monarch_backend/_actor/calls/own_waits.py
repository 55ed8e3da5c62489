"""Waits of an actor for itself that certainly never end: for its own reply, or for space in its own queue."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.pending_calls import Stream
from monarch_backend._transport.local import tuning
from monarch_backend._transport.local.flow_control import credit_of
from monarch_backend._transport.local.frames import Kind

if TYPE_CHECKING:
    from monarch_backend._actor.execution.runner import ActorRunner
    from monarch_backend._actor.runtime import Runtime

_OWN_THREADS = ("MainThread", "monarch-", "monarch_")
"""Beginnings of the names of threads that read no ports of an endpoint's code. `Runtime.expecting` has callbacks."""

_USERS_THREADS = ("monarch-thread", "monarch_callback")
"""Names of the package's threads that run the user's code: methods of a mesh's end, and callbacks of collectives."""


def waits_for_own_reply(runtime: Runtime, runner: ActorRunner, what: Any) -> bool:
    """Return whether this actor, on its own thread, must handle a call before the wait for the call can end."""
    core = getattr(what, "core", None)
    if core is None or core.actor != runner.actor or what.ready or not is_own_thread(runner):
        return False
    me = runtime.router.me
    if isinstance(what, Stream):
        last = what.last_sender()
        is_missing = last is not None and last[0] is me
    else:
        is_missing = any(peer is me for _, peer in what.missing())
    return is_missing and (_is_running(runner, what.ref, me) or _is_queued(runner, what.ref, me))


def _is_running(runner: ActorRunner, ref: int, me: Any) -> bool:
    """Return whether the call runs and only its end sends the reply. A reply port may be elsewhere."""
    return runner.code.is_running((me, ref)) and not runner.has_explicit_reply(ref)


def _is_queued(runner: ActorRunner, ref: int, me: Any) -> bool:
    return any(frame.ref == ref for frame in runner.inbox.sent_by(me))


def fills_own_queue(runtime: Runtime, runner: ActorRunner, kind: int, target: int) -> bool:
    """Return whether nothing but this actor, which is to wait for it, can free space for a message to its process."""
    if not is_own_thread(runner):
        return False
    if kind == Kind.PORT:
        return _is_only_reader(runtime, runner)
    if target != runner.actor:
        return False
    queued = runner.inbox.sent_by(runtime.router.me)
    lasting = [frame for frame in queued if not getattr(runtime.pending.get(frame.ref), "has_limit", False)]
    return sum(map(credit_of, lasting)) >= tuning.CREDIT_WINDOW


def has_alarm() -> bool:
    """Return whether the handler of an alarm may end a wait of this thread, which is then a limit of time."""
    return threading.current_thread() is threading.main_thread() and signal.getitimer(signal.ITIMER_REAL)[0] > 0.0


def _is_only_reader(runtime: Runtime, runner: ActorRunner) -> bool:
    """Return whether no other code of this process reads ports: the main program, an actor, a callback, a thread."""
    if runtime.root is None or runtime.expecting:
        return False
    if any(other is not runner and other.failure is None for other in list(runtime.runners.values())):
        return False
    return has_no_other_thread({threading.get_ident()})


def has_no_other_thread(known: Collection[int]) -> bool:
    """Return whether no thread of this process runs a user's code, beside those with these identifiers."""
    return all(thread.ident in known or _is_ours(thread.name) for thread in threading.enumerate())


def _is_ours(name: str) -> bool:
    return name.startswith(_OWN_THREADS) and name not in _USERS_THREADS


def is_own_thread(runner: ActorRunner) -> bool:
    """Return whether this is the thread on which the actor runs its messages."""
    return runner.code.thread_id == threading.get_ident()
