"""Waits of an actor for itself that certainly never end: for its own reply, or for space in its own queue."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.pending_calls import Stream
from monarch_backend._transport.local import tuning
from monarch_backend._transport.local.flow_control import credit_of
from monarch_backend._transport.local.frames import Kind

if TYPE_CHECKING:
    from monarch_backend._actor.execution.runner import ActorRunner
    from monarch_backend._actor.runtime import Runtime

_OWN_THREADS = ("MainThread", "monarch-", "monarch_", "actor ")
"""Beginnings of the names of threads that read no ports of an endpoint's code. `Runtime.expecting` has callbacks."""


def waits_for_own_reply(runtime: Runtime, runner: ActorRunner, what: Any) -> bool:
    """Return whether this actor, on its own thread, must handle a call before the wait for the call can end."""
    core = getattr(what, "core", None)
    if core is None or core.actor != runner.actor or what.ready or not _is_own_thread(runner):
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
    if not _is_own_thread(runner):
        return False
    if kind == Kind.PORT:
        return _is_only_reader(runtime, runner)
    own = sum(credit_of(frame) for frame in runner.inbox.sent_by(runtime.router.me))
    return target == runner.actor and own >= tuning.CREDIT_WINDOW


def _is_only_reader(runtime: Runtime, runner: ActorRunner) -> bool:
    """Return whether no other code of this process reads ports: the main program, an actor, a callback, a thread."""
    if runtime.root is None or runtime.expecting:
        return False
    if any(other is not runner and other.failure is None for other in list(runtime.runners.values())):
        return False
    me = threading.current_thread()
    return all(thread is me or thread.name.startswith(_OWN_THREADS) for thread in threading.enumerate())


def _is_own_thread(runner: ActorRunner) -> bool:
    return runner.code.thread_id == threading.get_ident()
