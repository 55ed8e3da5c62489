"""Detection of deadlocks: actors that handle one message at a time and wait for each other's replies.

A wait that lasts sends a probe to the process of the called actor. If that actor waits, too, it forwards the probe to
the actor that it waits for. A probe that returns to its sender has found a cycle (Chandy, Misra and Haas 1983). No
process keeps the whole graph, and it works over hosts. An edge is certain or does not count:

- The waiting thread is the actor's own. It waits for a call, without any limit of time.
- The call is queued at the actor or is its running message, and nothing else can send the reply.

An actor that waits cannot reply, so an edge outlives the next one. So all edges hold when the probe returns. Only the
cancellation of a call can end the cycle after that. Then two more messages go around the cycle. The first one makes
every member ignore replies, so that none continues with the error of another. The second one raises `DeadlockError`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.codec import HOST, read_prefix
from monarch_backend._actor.calls.pending_calls import BroadcastCall, UnaryCall
from monarch_backend._actor.errors import DeadlockError
from monarch_backend._actor.execution.interruption import CONSTRUCTOR
from monarch_backend._core import env
from monarch_backend._transport.local.event_loop import ProgressLoop, Timer
from monarch_backend._transport.local.frames import Deadlock, DeadlockMember, DeadlockStep, Frame
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.execution.runner import ActorRunner
    from monarch_backend._actor.runtime import Runtime

FIRST_PROBE_S = 0.2
"""Seconds from the moment that a wait is shown, which is `waiting.SHORT_WAIT_S` after its start, to its first probe."""

MAX_PROBE_INTERVAL_S = 10.0
"""The interval between two probes of a wait doubles up to this time."""

MAX_MEMBERS = 64
"""Longest cycle that is found. It bounds the size of a probe."""

RAISE_AFTER_S = 10.0
"""Seconds after which a member raises without the last message, if another member has ended meanwhile."""

_MAX_NAME = 200


class _Wait:
    """Wait of an actor for the replies of a call."""

    __slots__ = ("call", "forwarded", "pause", "runner", "timer")

    def __init__(self, runner: ActorRunner, call: UnaryCall[Any] | BroadcastCall[Any]) -> None:
        self.runner, self.call = runner, call
        self.pause = FIRST_PROBE_S
        self.timer: Timer | None = None
        self.forwarded: dict[tuple[str, int], int] = {}  # number of the last probe of each sender

    def missing(self) -> list[Peer]:
        """Return the processes that have not replied."""
        return [peer for _, peer in self.call.missing()]


class DeadlockDetector:
    """Probes of the actors of this process. Methods run on the reading thread unless stated."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waits: dict[int, _Wait] = {}  # by the actor's number
        self._claimed: dict[tuple[int, int], tuple[_Wait, list[Peer]]] = {}  # by the numbers of actor and wait
        self._probes = itertools.count(1)
        self._is_on = bool(env.get("MONARCH_DEADLOCK_DETECTION")) and isinstance(runtime.progress, ProgressLoop)

    # ---- on the thread that waits

    @contextlib.contextmanager
    def watched(self, what: Any, seconds: float | None, runner: ActorRunner | None) -> Iterator[None]:
        """Probe while an actor waits, unless the wait is no certain edge. The call raises the error itself."""
        if not self._counts(what, seconds, runner):
            yield
            return
        assert runner is not None
        wait = self._waits[runner.actor] = _Wait(runner, what)
        wait.timer = self._runtime.progress.later(wait.pause, lambda: self._probe(wait))
        try:
            yield
        finally:
            if self._waits.get(runner.actor) is wait:
                del self._waits[runner.actor]
            wait.timer.cancel()

    def _counts(self, what: Any, seconds: float | None, runner: ActorRunner | None) -> bool:
        if not self._is_on or runner is None or seconds is not None or not _is_own(runner):
            return False
        return isinstance(what, (UnaryCall, BroadcastCall)) and not getattr(what, "has_limit", False)

    # ---- probes

    def _probe(self, wait: _Wait) -> None:
        if self._waits.get(wait.runner.actor) is not wait or wait.call.ready:
            return
        wait.pause = min(2 * wait.pause, MAX_PROBE_INTERVAL_S)
        wait.timer = self._runtime.progress.later(wait.pause, lambda: self._probe(wait))
        self._forward(wait, next(self._probes), [])

    def _forward(self, wait: _Wait, number: int, members: list[DeadlockMember]) -> None:
        member = self._member(wait)
        if member is None or len(members) >= MAX_MEMBERS:
            return
        message = Deadlock(DeadlockStep.PROBE, number, wait.call.core.actor, wait.call.ref, [*members, member])
        for peer in wait.missing():
            self._runtime.router.tell(peer, message)

    def receive(self, peer: Peer, message: Deadlock, _: Frame) -> None:
        """Handle a probe, or a message to the members of a cycle."""
        if message.step == DeadlockStep.PROBE:
            self._receive_probe(peer, message)
        elif message.step == DeadlockStep.CLAIM:
            self._claim(peer, message)
        else:
            self._raise(message)

    def _receive_probe(self, peer: Peer, probe: Deadlock) -> None:
        wait = self._blocked(peer, probe.actor, probe.ref)
        if wait is None:
            return
        here, first = (self._runtime.router.token, wait.runner.actor), probe.members[0]
        sender = first.token, first.actor
        if sender == here:
            if first.ref == wait.call.ref:
                self._claim(peer, Deadlock(DeadlockStep.CLAIM, 0, 0, 0, probe.members))
            return
        if wait.forwarded.get(sender, 0) >= probe.number:
            return
        wait.forwarded[sender] = probe.number
        if here not in [(member.token, member.actor) for member in probe.members]:  # else others find this cycle
            self._forward(wait, probe.number, probe.members)

    def _wait_of(self, actor: int) -> _Wait | None:
        """Return the wait of an actor that goes on until it gets what it waits for."""
        wait, runner = self._waits.get(actor), self._runtime.runners.get(actor)
        if wait is None or runner is not wait.runner or runner.failure is not None or wait.call.ready:
            return None
        return None if runner.code.is_cancelled or runner.code.aborted is not None else wait

    def _blocked(self, peer: Peer, actor: int, ref: int) -> _Wait | None:
        """Return the wait of the actor that must handle this call, None if it may reply without a further message."""
        wait = self._wait_of(actor)
        if wait is None:
            return None
        runner, answer = wait.runner, wait.runner.running_reply
        if runner.code.running == (peer, ref):
            return None if answer is None or answer.explicit else wait
        return wait if any(frame.ref == ref for frame in _queued(runner, peer)) else None

    def _member(self, wait: _Wait) -> DeadlockMember | None:
        runner = wait.runner
        answer, running = runner.running_reply, runner.code.running
        if running is CONSTRUCTOR:
            endpoint = "__init__"
        elif running is None or answer is None:
            return None
        else:
            endpoint = read_prefix(answer.prefix)[0].method
        return DeadlockMember(
            self._runtime.router.token, runner.actor, wait.call.ref, runner.name[:_MAX_NAME], runner.rank,
            endpoint[:_MAX_NAME], f"{wait.call.core.name}.{wait.call.endpoint}"[:_MAX_NAME], HOST, self._runtime.pid,
        )  # fmt: skip

    # ---- a cycle

    def _claim(self, peer: Peer, message: Deadlock) -> None:
        """Ignore the reply of this member's call, and pass the message on. The first member then begins to raise."""
        members, place = message.members, message.number
        if place == len(members):
            self._drop(peer, members[0].actor, members[-1].ref)
            self._raise(Deadlock(DeadlockStep.RAISE, 0, 0, 0, members))
            return
        member, following = members[place], members[(place + 1) % len(members)]
        key = member.actor, member.ref
        wait = self._waits.get(member.actor)
        if key not in self._claimed:
            if wait is None or wait.call.ref != member.ref or wait.call.ready:
                return
            if self._runtime.pending.pop(wait.call.ref, None) is None:  # it has just ended
                return
            self._claimed[key] = wait, [each for each in wait.missing() if each.token == following.token]
            own = Deadlock(DeadlockStep.RAISE, place, 0, 0, members)
            self._runtime.progress.later(RAISE_AFTER_S, lambda: self._raise(own))
        if place:
            self._drop(peer, member.actor, members[place - 1].ref)
        for each in self._claimed[key][1]:
            self._runtime.router.tell(each, Deadlock(DeadlockStep.CLAIM, place + 1, 0, 0, members))

    def _drop(self, peer: Peer, actor: int, ref: int) -> None:
        """Remove the former member's call if it is queued: its caller continues with the error."""
        runner = self._runtime.runners.get(actor)
        if runner is not None:
            runner.inbox.cancel(peer, ref)

    def _raise(self, message: Deadlock) -> None:
        members, place = message.members, message.number % len(message.members)
        member = members[place]
        claimed = self._claimed.pop((member.actor, member.ref), None)
        if claimed is None:  # raised, and passed on then
            return
        wait, peers = claimed
        for each in peers:
            self._runtime.router.tell(each, Deadlock(DeadlockStep.RAISE, place + 1, 0, 0, members))
        wait.call._fail(_error(members[place:] + members[:place]))
        self._runtime.progress.wake()


def _is_own(runner: ActorRunner) -> bool:
    """Return whether the actor handles one message at a time, on this thread."""
    return not runner.is_async and runner.code.thread_id == threading.get_ident()


def _queued(runner: ActorRunner, peer: Peer) -> list[Frame]:
    """Return the messages from a process in an actor's queue."""
    return [item[1] for item in list(runner.inbox) if isinstance(item, tuple) and item[0] is peer]


def _error(members: list[DeadlockMember]) -> DeadlockError:
    """Return the error of the first of these members."""
    edges = "; ".join(f"{each.name}.{each.endpoint} waits for {each.waits_for}" for each in members)
    lines = tuple(
        f"{each.name}.{each.endpoint} (rank {each.rank}, host {each.host}, pid {each.pid}) waits for {each.waits_for}"
        for each in members
    )
    several = f"a cycle of {len(members)} actors that wait for each other"
    what = several if len(members) > 1 else "an actor that waits for itself"
    return DeadlockError(
        f"{what}: {edges}\n"
        + "".join(f"  {line}\n" for line in lines)
        + "None would continue: an actor handles one message at a time. Return before "
        "asking, or call the method of the own instance directly, self.method(...), or make the endpoints concurrent "
        "(@concurrent_endpoint and async def). Calls with a limit of time are not checked.",
        lines,
    )
