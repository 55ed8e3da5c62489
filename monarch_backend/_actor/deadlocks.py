"""Detection of deadlocks: actors that handle one message at a time and wait for each other.

A wait that lasts sends a probe to the process of the called actor. If that actor waits, too, it forwards the probe to
the actor that it waits for. A probe that returns to its sender has found a cycle (Chandy, Misra and Haas 1983). No
process keeps the whole graph, and it works over hosts. An edge is certain or does not count:

- The waiting thread is the actor's own, or its only task awaits on an event loop without timers (awaits.py).
- The wait has no limit of time, and is for one of these:
- The reply of a call. The call is queued at the actor or is its running message, and nothing else can send the reply.
  An endpoint with an explicit reply port only sends with it (execution/port_use.py).
- The next value of the only generator that has not ended, or all values of generators. All values that a generator has
  sent have arrived.
- A collective that a rank has not entered (collective_waits.py).
- Credit for a message to a process. One waiting actor there has a whole window of credits in its queue, in messages
  from this process that nothing but this actor takes from the queue. Members of the cycle in that process count, too.

An actor that waits cannot reply, send a value or take a message. So an edge outlives the next one, and all edges hold
when the probe returns. For credit, this needs the order of messages: the probe arrives after all messages that were
sent before it. So the window of credits was missing when the probe was sent, and is missing until the actor continues.
Credit on its way to the sender cannot be in that queue, so it needs no check.

Only the cancellation of a call can end the cycle after that. Then two more messages go around the cycle. The first one
makes every member ignore what it waits for, so that none continues with the error of another. The second one raises
`DeadlockError`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.codec import HOST, read_prefix
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.calls.own_waits import has_alarm, is_own_thread
from monarch_backend._actor.calls.pending_calls import BroadcastCall, Stream, UnaryCall
from monarch_backend._actor.collective_waits import CollectiveWaits, EnteredCollective
from monarch_backend._actor.errors import DeadlockError
from monarch_backend._actor.execution.interruption import CONSTRUCTOR
from monarch_backend._core import env
from monarch_backend._transport.local import tuning
from monarch_backend._transport.local.event_loop import ProgressLoop, Timer, release
from monarch_backend._transport.local.flow_control import credit_of
from monarch_backend._transport.local.frames import Deadlock, DeadlockMember, DeadlockStep, Frame
from monarch_backend._transport.local.peer import CreditWaiter, Peer
from monarch_backend._transport.tokens import identity_of

if TYPE_CHECKING:
    from monarch_backend._actor.execution.async_runner import AsyncActorRunner
    from monarch_backend._actor.execution.runner import ActorRunner
    from monarch_backend._actor.runtime import Runtime

FIRST_PROBE_S = 0.2
"""Seconds from the moment that a wait is shown, which is `waiting.SHORT_WAIT_S` after its start, to its first probe."""

MAX_PROBE_INTERVAL_S = 10.0
"""The interval between two probes of a wait doubles up to this time."""

MAX_MEMBERS = 64
"""Longest cycle that is found. It bounds the size of a probe."""

RAISE_AFTER_S = 10.0
"""Seconds after which a member raises without the last message, if another host is lost and its end is not known."""

_MAX_NAME = 200


_ANY_ACTOR, _COLLECTIVE = 0, -1
"""In place of an actor in probes: for a wait for credit, and for a late rank of a collective."""


class _Wait:
    """Wait of an actor for the replies of a call."""

    __slots__ = (
        "actor", "awaited", "forwarded", "future", "keeps_reply", "pause", "ref", "runner", "timer", "waits_for",
        "what",
    )  # fmt: skip

    def __init__(self, runner: ActorRunner, what: Any, future: Future[Any] | None = None, awaited: Any = None) -> None:
        self.runner, self.what = runner, what
        self.future, self.awaited = future, awaited  # of a coroutine: what it awaits, and the event loop's future of it
        self.keeps_reply = runner.keeps_reply()
        self.pause = FIRST_PROBE_S
        self.timer: Timer | None = None
        self.forwarded: dict[tuple[str, int], int] = {}  # number of the last probe of each sender
        self._describe()

    def _describe(self) -> None:
        call = self.what
        self.actor, self.ref = call.core.actor, call.ref
        self.waits_for = f"{call.core.name}.{call.endpoint}"[:_MAX_NAME]

    @property
    def is_over(self) -> bool:
        """Whether what is waited for has come."""
        return bool((self.future or self.what).ready)

    def receivers(self) -> list[tuple[Peer, int]]:
        """Return the processes that each must do something before the wait can end.

        Each has the number of values of its generator that have arrived.
        """
        return [(peer, 0) for _, peer in self.what.missing()]

    def counts_calls(self) -> bool:
        """Return `Deadlock.counts_calls`."""
        return False

    def until(self, given_up: Callable[[], bool] | None) -> Callable[[], bool] | None:
        """Return the condition that ends the wait early."""
        return given_up

    def claim(self) -> bool:
        """Ignore from now on what would end the wait. Return False if it has just ended."""
        return self.runner.program.pending.pop(self.ref, None) is not None

    def fail(self, error: DeadlockError) -> None:
        """End a claimed wait with this error."""
        self.what._fail(error)

    def end(self) -> None:
        """Note that the wait has ended."""

    def settle(self, given_up: Callable[[], bool] | None) -> None:
        """Raise the error of a claimed wait, unless what was waited for raises it. Called after the wait."""


class _StreamWait(_Wait):
    """Wait of an actor for the next value or reply of a stream, or for all values of generators."""

    __slots__ = ()

    def receivers(self) -> list[tuple[Peer, int]]:
        senders: list[tuple[Peer, int]] = self.what.awaited_senders()
        return senders

    def fail(self, error: DeadlockError) -> None:
        for rank in sorted(self.what._open):
            self.what.refuse(rank, error)


class _CreditWait(_Wait):
    """Wait of an actor for credit, in the middle of sending a message."""

    __slots__ = ("_is_claimed", "_is_over", "_lock", "error", "ready", "wait_lock")

    def _describe(self) -> None:
        self.actor, self.ref, self.waits_for = _ANY_ACTOR, next(self.runner.program.ids), ""
        self.ready = False
        self.wait_lock: threading.Lock | None = None
        self.error: DeadlockError | None = None
        self._lock = threading.Lock()
        self._is_claimed = self._is_over = False

    def receivers(self) -> list[tuple[Peer, int]]:
        return [(self.what.receiver, 0)]

    def counts_calls(self) -> bool:
        """Return whether nothing but a thread that the actor itself has started can cancel a call to the receiver.

        Such a call may hold credit. Its cancellation removes it from the queue, and returns the credit.
        """
        runner, runtime, receiver = self.runner, self.runner.program, self.what.receiver
        if runtime.root is None:  # the main program's code
            return False
        if any(other is not runner and other.failure is None for other in list(runtime.runners.values())):
            return False
        for call in list(runtime.pending.values()):
            if not isinstance(call, (UnaryCall, BroadcastCall)):  # the garbage collector cancels a stream
                return False
            if getattr(call, "has_limit", False) and any(peer is receiver for _, peer in call.missing()):
                return False
        return True

    def until(self, given_up: Callable[[], bool] | None) -> Callable[[], bool] | None:
        return lambda: self.error is not None or (given_up is not None and given_up())

    def claim(self) -> bool:
        with self._lock:
            self._is_claimed = not (self._is_over or self.what.ready)
            return self._is_claimed

    def fail(self, error: DeadlockError) -> None:
        self.error = error
        self.ready = True
        release(self)
        release(self.what)  # other threads that wait for this credit look, and wait again

    def end(self) -> None:
        with self._lock:
            self._is_over = True

    def settle(self, given_up: Callable[[], bool] | None) -> None:
        if self._is_claimed and self.error is None:  # credit has come since
            self.runner.program.progress.wait(self, None, given_up)
        if self.error is not None:
            raise self.error


class _Claim:
    """Claim on a wait that is to raise, and the calls of former members to drop then.

    ``last_step`` makes this member raise, and then the others, if the last message is lost.
    """

    __slots__ = ("calls", "last_step", "wait")

    def __init__(self, wait: _Wait, last_step: Deadlock) -> None:
        self.wait, self.last_step = wait, last_step
        self.calls: list[tuple[Peer, int]] = []


class DeadlockDetector:
    """Probes of the actors of this process. Methods run on the reading thread unless stated."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waits: dict[int, _Wait] = {}  # by the actor's number
        self._awaits: dict[Any, _Wait] = {}  # by the event loop's future
        self._claimed: dict[tuple[int, int], _Claim] = {}  # by the numbers of actor and wait
        self._probes = itertools.count(1)
        self._collectives = CollectiveWaits(runtime)
        self.is_on = bool(env.get("MONARCH_DEADLOCK_DETECTION")) and isinstance(runtime.progress, ProgressLoop)

    # ---- on the thread that waits

    @contextlib.contextmanager
    def watched(
        self, what: Any, seconds: float | None, runner: ActorRunner | None, given_up: Callable[[], bool] | None
    ) -> Iterator[Callable[[], bool] | None]:
        """Probe while an actor waits, unless the wait is no certain edge. Give the condition that ends it early.

        A wait for credit raises DeadlockError here. A call or stream raises it itself.
        """
        wait = self._wait_for(what, seconds, runner)
        if wait is None:
            yield given_up
            return
        actor = wait.runner.actor
        self._waits[actor] = wait
        wait.timer = self._runtime.progress.later(wait.pause, lambda: self._probe(wait))
        try:
            yield wait.until(given_up)
        finally:
            if self._waits.get(actor) is wait:
                del self._waits[actor]
            wait.timer.cancel()
            wait.end()
        wait.settle(given_up)

    def _wait_for(self, what: Any, seconds: float | None, runner: ActorRunner | None) -> _Wait | None:
        if not self.is_on or runner is None or seconds is not None or not _is_own(runner) or has_alarm():
            return None
        if isinstance(what, CreditWaiter):
            return None if what.receiver is None else _CreditWait(runner, what)
        kind = _kind_of(what)
        return None if kind is None else kind(runner, what)

    # ---- on the event loop that awaits

    def begin_await(self, runner: AsyncActorRunner, future: Future[Any], what: Any, awaited: Any) -> None:
        """Probe while a coroutine of an actor awaits a call or stream, unless this is no certain edge.

        Does nothing if there are probes already.
        """
        kind, former = _kind_of(what), self._waits.get(runner.actor)
        if kind is None or (former is not None and former.awaited is awaited):
            return
        wait = self._waits[runner.actor] = self._awaits[awaited] = kind(runner, what, future, awaited)
        wait.timer = self._runtime.progress.later(0.0, lambda: self._probe(wait))

    def end_await(self, awaited: Any) -> None:
        """Note that a coroutine does not await this future any more."""
        wait = self._awaits.pop(awaited, None)
        if wait is None:
            return
        if self._waits.get(wait.runner.actor) is wait:
            del self._waits[wait.runner.actor]
        if wait.timer is not None:
            wait.timer.cancel()

    # ---- probes

    def _probe(self, wait: _Wait) -> None:
        if self._waits.get(wait.runner.actor) is not wait or wait.is_over:
            return
        wait.pause = min(2 * wait.pause, MAX_PROBE_INTERVAL_S)
        wait.timer = self._runtime.progress.later(wait.pause, lambda: self._probe(wait))
        self._confirm(wait, lambda: self._forward(wait, next(self._probes), []))

    def _confirm(self, wait: _Wait, then: Callable[[], None]) -> None:
        """Call a function unless the actor may go on before its wait ends.

        A wait on an actor's thread was checked when it began. An await is checked on its event loop. If the same await
        goes on after that, the answer holds still.
        """
        if wait.awaited is None:
            then()
            return
        runner: Any = wait.runner

        def look() -> None:
            if runner.awaited() is wait.awaited:
                self._runtime.call_soon(lambda: then() if self._wait_of(runner.actor) is wait else None)

        runner.on_loop(look)

    def _forward(self, wait: _Wait, number: int, members: list[DeadlockMember]) -> None:
        member = self._member(wait)
        if member is None or len(members) >= MAX_MEMBERS:
            return
        path, counts_calls = [*members, member], wait.counts_calls()
        for peer, received in wait.receivers():
            probe = Deadlock(DeadlockStep.PROBE, number, wait.actor, wait.ref, path, received, counts_calls)
            self._runtime.router.tell(peer, probe)

    def receive(self, peer: Peer, message: Deadlock, _: Frame) -> None:
        """Handle a probe, or a message to the members of a cycle."""
        if message.step == DeadlockStep.PROBE:
            self._receive_probe(peer, message)
        elif message.step == DeadlockStep.CLAIM:
            self._claim(peer, message)
        else:
            self._raise(message)

    def _receive_probe(self, peer: Peer, probe: Deadlock) -> None:
        if probe.actor == _ANY_ACTOR:
            self._follow(peer, probe, self._full(peer, probe))
        elif probe.actor == _COLLECTIVE:
            self._follow_to_late_rank(peer, probe)
        elif (wait := self._waits.get(probe.actor)) is not None:
            self._confirm(wait, lambda: self._follow(peer, probe, self._blocked(peer, probe)))
        elif (runner := self._runtime.runners.get(probe.actor)) is not None and not runner.code.is_ending():
            self._collectives.find(runner, lambda entered: self._follow_collective(peer, probe, runner, entered))

    def _follow(self, peer: Peer, probe: Deadlock, wait: _Wait | None) -> None:
        """Forward a probe along the wait that it has found, or begin with the cycle that it has closed."""
        if wait is None:
            return
        here, first = (self._runtime.router.token, wait.runner.actor), probe.members[0]
        sender = first.token, first.actor
        if sender == here:
            if first.ref == wait.ref:
                self._claim(peer, Deadlock(DeadlockStep.CLAIM, 0, 0, 0, probe.members))
            return
        if wait.forwarded.get(sender, 0) >= probe.number:
            return
        wait.forwarded[sender] = probe.number
        if here not in [(member.token, member.actor) for member in probe.members]:  # else others find this cycle
            self._forward(wait, probe.number, probe.members)

    def _follow_collective(self, peer: Peer, probe: Deadlock, runner: ActorRunner, entered: EnteredCollective) -> None:
        """Forward a probe from an actor in a collective to the late ranks."""
        members, here = probe.members, (self._runtime.router.token, runner.actor)
        if len(members) >= MAX_MEMBERS or here in [(each.token, each.actor) for each in members]:
            return
        _, answer = runner.running_message()
        if answer is None or not _is_edge(runner, peer, probe, runner.keeps_reply()):
            return
        endpoint = read_prefix(answer.prefix)[0].method
        path = [*members, self._member_of(runner, entered.group, endpoint, entered.text, in_collective=True)]
        step = Deadlock(DeadlockStep.PROBE, probe.number, _COLLECTIVE, entered.group, path, entered.number)
        for late in self._peers_of(entered.late):
            self._runtime.router.tell(late, step)

    def _peers_of(self, identities: Collection[int]) -> list[Peer]:
        """Return processes by their identities: those of this process's group, and others with which it has a link."""
        router = self._runtime.router
        group = [token for token in self._runtime.group_tokens if identity_of(token) in identities]
        found = {router.peer(token) for token in group}
        return list(found | {each for each in list(router.peers.values()) if each.identity in identities})

    def _follow_to_late_rank(self, peer: Peer, probe: Deadlock) -> None:
        """Follow a probe to this process if it has not entered the collective of the last member.

        The wait that is followed has begun before the look. So the process was late during this wait.
        """
        runner = self._collectives.only_actor()
        wait = None if runner is None else self._waits.get(runner.actor)
        if runner is None or wait is None:
            return

        def follow() -> None:
            if self._collectives.only_actor() is runner and self._wait_of(runner.actor) is wait:
                self._confirm(wait, lambda: self._follow(peer, probe, wait))

        self._collectives.confirm_late(probe.ref, probe.received, follow)

    def _wait_of(self, actor: int) -> _Wait | None:
        """Return the wait of an actor that goes on until it gets what it waits for."""
        wait, runner = self._waits.get(actor), self._runtime.runners.get(actor)
        if wait is None or runner is not wait.runner or runner.failure is not None or wait.is_over:
            return None
        return None if runner.code.is_ending() else wait

    def _blocked(self, peer: Peer, probe: Deadlock) -> _Wait | None:
        """Return the wait of the actor that must handle this call, None if it may reply without a further message."""
        wait = self._wait_of(probe.actor)
        if wait is None:
            return None
        return wait if _is_edge(wait.runner, peer, probe, wait.keeps_reply) else None

    def _full(self, peer: Peer, probe: Deadlock) -> _Wait | None:
        """Return the wait of the actor whose queue holds all credit of the probe's sender; None if it may come back.

        The queues of former members count, too. If credit may come back, that of processed messages goes to the sender
        now: fewer messages than a window of credits are in the queues.
        """
        refs = {member.actor: member.ref for member in probe.members if member.token == self._runtime.router.token}
        calls = self._waited_calls(peer, probe)
        first, total, largest, following = probe.members[0], 0, 0, None
        closes: _Wait | None = None
        for actor in list(self._waits):
            wait = self._wait_of(actor)
            if wait is not None and wait.awaited is not None:  # credit may move before the event loop confirms it
                continue
            held = 0 if wait is None else _held(wait.runner, peer, calls)
            if wait is None or held == 0:
                continue
            if refs.get(actor) == wait.ref:
                total += held
                if (first.token, first.actor) == (self._runtime.router.token, actor):
                    closes = wait
            elif held > largest:
                largest, following = held, wait
        if closes is not None and total >= tuning.CREDIT_WINDOW:
            return closes
        if total + largest >= tuning.CREDIT_WINDOW:
            return following
        self._runtime.router.flow.return_credit(peer)
        return None

    def _waited_calls(self, peer: Peer, probe: Deadlock) -> set[int] | None:
        """Return the numbers of the process's calls that hold credit, as its actors wait for them. None: all calls."""
        if probe.counts_calls:
            return None
        calls = {member.ref for member in probe.members if member.token == peer.token}
        if peer is self._runtime.router.me:
            calls |= {wait.ref for wait in list(self._waits.values()) if wait.awaited is None}
        return calls

    def _member(self, wait: _Wait) -> DeadlockMember | None:
        runner = wait.runner
        running, answer = runner.running_message()
        if running is CONSTRUCTOR:
            endpoint = "__init__"
        elif running is None or answer is None or (wait.actor == _ANY_ACTOR and answer.port is not None):
            return None  # the message that waits may be its reply to a port, which must not fail
        else:
            endpoint = read_prefix(answer.prefix)[0].method
        return self._member_of(runner, wait.ref, endpoint, wait.waits_for)

    def _member_of(
        self, runner: ActorRunner, ref: int, endpoint: str, waits_for: str, *, in_collective: bool = False
    ) -> DeadlockMember:
        return DeadlockMember(
            self._runtime.router.token, runner.actor, ref, runner.name[:_MAX_NAME], runner.rank,
            endpoint[:_MAX_NAME], waits_for[:_MAX_NAME], HOST, self._runtime.pid, in_collective,
        )  # fmt: skip

    # ---- a cycle

    def _claim(self, peer: Peer, message: Deadlock) -> None:
        """Ignore what would end this member's wait, and pass the message on. The first member then begins to raise."""
        members, place = message.members, message.number
        if place == len(members):
            first = members[0]
            self._drop_later(first, peer, members[-1].ref)
            self._raise(Deadlock(DeadlockStep.RAISE, 0, 0, 0, members))
            return
        member = members[place]
        if member.in_collective:  # its wait ends once the late rank has raised, and then enters the collective
            self._drop(peer, member.actor, members[place - 1].ref)
            self._tell_next(Deadlock(DeadlockStep.CLAIM, place + 1, 0, 0, members))
            return
        key = member.actor, member.ref
        wait = self._waits.get(member.actor)
        if key not in self._claimed:
            if wait is None or wait.ref != member.ref or wait.is_over or not wait.claim():
                if place:  # it has just ended, in another cycle or by a cancellation: the claimed ones must raise
                    self._drop(peer, member.actor, members[place - 1].ref)
                    self._pass_on(Deadlock(DeadlockStep.RAISE, place, 0, place, members))
                return
            own = Deadlock(DeadlockStep.RAISE, place, 0, place, members)
            self._claimed[key] = _Claim(wait, own)
            self._runtime.progress.later(RAISE_AFTER_S, lambda: self._raise(own) if key in self._claimed else None)
        if place:
            self._drop_later(member, peer, members[place - 1].ref)
        self._tell_next(Deadlock(DeadlockStep.CLAIM, place + 1, 0, 0, members))

    def _tell_next(self, message: Deadlock) -> None:
        """Send a message to the process of the member that it is for."""
        member = message.members[message.number % len(message.members)]
        self._runtime.router.tell(self._runtime.router.peer(member.token), message)

    def _pass_on(self, message: Deadlock) -> None:
        """Have the next member raise whose process has not ended, unless this message began there."""
        members, place = message.members, message.number
        while (place := (place + 1) % len(members)) != message.ref:
            if self._runtime.router.peer(members[place].token).gone is None:
                self._tell_next(Deadlock(DeadlockStep.RAISE, place, 0, message.ref, members))
                return

    def on_process_lost(self, peer: Peer) -> None:
        """Raise in the cycles with a member in a process that has ended: it may not have passed on a message."""
        for claim in list(self._claimed.values()):
            if any(member.token == peer.token for member in claim.last_step.members):
                self._raise(claim.last_step)

    def _drop_later(self, member: DeadlockMember, peer: Peer, ref: int) -> None:
        """Drop the former member's call when this member raises: before that, its credit could end another wait."""
        claim = self._claimed.get((member.actor, member.ref))
        if claim is None:  # it has raised, in another cycle
            self._drop(peer, member.actor, ref)
        else:
            claim.calls.append((peer, ref))

    def _drop(self, peer: Peer, actor: int, ref: int) -> None:
        """Remove the former member's call if it is queued, and end a generator: its caller continues with the error."""
        runner = self._runtime.runners.get(actor)
        if runner is None or runner.withdraw(peer, ref):
            return
        flow = runner.streams.get((peer.token, ref))
        if flow is not None:
            flow.close()

    def _raise(self, message: Deadlock) -> None:
        members, place = message.members, message.number % len(message.members)
        member = members[place]
        claim = self._claimed.pop((member.actor, member.ref), None)
        for peer, ref in () if claim is None else claim.calls:
            self._drop(peer, member.actor, ref)
        self._pass_on(message)
        if claim is None:  # it has raised, in another cycle
            return
        claim.wait.fail(_error(members[place:] + members[:place]))
        self._runtime.progress.wake()


def _is_own(runner: ActorRunner) -> bool:
    """Return whether this is the actor's thread, and the actor does nothing else while it waits."""
    return is_own_thread(runner) and runner.handles_alone()


def _kind_of(what: Any) -> type[_Wait] | None:
    """Return the class of a wait for the replies of a call or for a stream, None if it has a limit of time."""
    if getattr(what, "has_limit", False):
        return None
    if isinstance(what, (UnaryCall, BroadcastCall)):
        return _Wait
    return _StreamWait if isinstance(what, Stream) else None


def _is_edge(runner: ActorRunner, peer: Peer, probe: Deadlock, keeps_reply: bool) -> bool:
    """Return whether the call of a probe cannot end before this actor continues: it runs or is queued there."""
    if runner.running_message()[0] == (peer, probe.ref):
        flow = runner.streams.get((peer.token, probe.ref))
        return keeps_reply and probe.received == (0 if flow is None else flow.sent)  # else a value is on its way
    return any(frame.ref == probe.ref for frame in runner.inbox.sent_by(peer))


def _held(runner: ActorRunner, peer: Peer, calls: set[int] | None) -> int:
    """Return the credits of a process that the messages in an actor's queue hold until the actor takes them.

    Other calls than ``calls`` can be cancelled, which takes them from the queue. So they do not count.
    """
    queued = runner.inbox.sent_by(peer)
    return sum(credit_of(frame) for frame in queued if frame.ref == 0 or calls is None or frame.ref in calls)


def _error(members: list[DeadlockMember]) -> DeadlockError:
    """Return the error of the first of these members."""
    following = [*members[1:], members[0]]
    waits = [
        each.waits_for or f"space in the queue of {other.name}" for each, other in zip(members, following, strict=True)
    ]
    pairs = list(zip(members, waits, strict=True))
    edges = "; ".join(f"{each.name}.{each.endpoint} waits for {what}" for each, what in pairs)
    lines = tuple(
        f"{each.name}.{each.endpoint} (rank {each.rank}, host {each.host}, pid {each.pid}) waits for {what}"
        for each, what in pairs
    )
    is_full = not all(each.waits_for for each in members)
    cure = " Where a queue is full, wait for replies now and then (call instead of broadcast)." if is_full else ""
    if any(each.in_collective for each in members):
        cure += (
            " Call before or after the collective on all ranks: one that waits in it goes on once all have entered it."
        )
    several = f"a cycle of {len(members)} actors that wait for each other"
    what = several if len(members) > 1 else "an actor that waits for itself"
    return DeadlockError(
        f"{what}: {edges}\n"
        + "".join(f"  {line}\n" for line in lines)
        + "None would continue: an actor handles one message at a time. Return before "
        "asking, or call the method of its own instance directly, self.method(...), or make the endpoints concurrent "
        f"(@concurrent_endpoint and async def).{cure} Calls with a limit of time are not checked.",
        lines,
    )
