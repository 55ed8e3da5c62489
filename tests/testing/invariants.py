"""Invariants of every run: messages in order and at most once, true errors, futures that complete.

A `Watch` does the sending, so that it knows every message. Actors report to it what they execute, and it checks after
every step. random_world.py decides about messages and faults.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from monarch_backend.actor import ActorError, CancelledError, Channel, Future, PeerGoneError, SupervisionError
from monarch_backend.testing import SimulatedProcess, Simulation

BOUND = 0.5
"""Maximum simulated seconds from the death of a process to the error of every future that waits for it."""

MOST_STEPS = 1_000_000
"""Maximum steps of a run. More steps mean an endless loop."""

Key = tuple[str, int]  # an actor: its mesh and its rank there
Tag = tuple[int, int]  # a message: its sender's number, and its own number among the sender's messages


class Boom(Exception):
    """The exception that actors raise on purpose. Its argument is the tag of the message that requested it."""


@dataclass(eq=False)
class Sender:
    """An actor or the program in one process. The messages of one sender are numbered."""

    number: int
    name: str
    process: SimulatedProcess
    sent: int = 0


@dataclass(eq=False)
class Message:
    """One message to one or many ranks."""

    sender: Sender
    tag: Tag
    what: str
    homes: dict[Key, str]  # the receivers, and for each the token of the process where the sender believes it to be
    one_of: bool = False  # only one of them receives it
    must: bool = False  # no failure excuses its loss
    result: Any = None  # a Future, a Stream, or None
    at_once: bool = False  # the result was complete when the verb returned
    given_up: bool = False  # it was cancelled or timed out
    ran: set[Key] = field(default_factory=set)
    unsent: set[Key] = field(default_factory=set)  # receivers that an error reported as "not sent"
    order: list[Key] = field(default_factory=list)  # the receivers in the order of the called mesh's ranks

    @property
    def done(self) -> bool:
        """Whether the caller has its result."""
        result = self.result
        return result is None or (result.ready if isinstance(result, Future) else not result._open)

    def __str__(self) -> str:
        others = f" and {len(self.order) - 1} more" if len(self.order) > 1 else ""
        return f"{self.what} {self.tag} of {self.sender.name} to {self.order[0]}{others}"


class Watch:
    """Sends the messages of one simulation and checks the invariants."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.messages: dict[Tag, Message] = {}
        self.waiting: dict[Tag, Message] = {}  # messages without a reply so far
        self.violations: list[str] = []
        self.dead: dict[str, float] = {}  # time of death by token
        self.built: dict[Key, str] = {}  # token of each actor's process
        self.troubled: dict[Key, list[str]] = defaultdict(list)  # reasons why actors died or were stopped
        self.excused: set[Key] = set()  # troubled actors that may lose messages
        self.first: dict[str, int] = {}  # first process rank of each mesh of actors on a part of a mesh of processes
        self.executed = self.steps = 0
        self._shouted: dict[Sender, list[int]] = defaultdict(list)
        self._heard: dict[int, list[int]] = defaultdict(list)
        self._last: dict[tuple[int, Key], int] = {}
        self._numbers = itertools.count(1)
        self._late: list[tuple[float, Tag]] = []
        simulation.on_step.append(self.check)
        simulation.on_death.append(self.died)

    # ---- sending

    def sender(self, name: str) -> Sender:
        """Return a sender for the process that runs now."""
        return Sender(next(self._numbers), name, self.simulation.running)

    def send(
        self, sender: Sender, verb: str, mesh: Any, endpoint: str, *args: Any, must: bool = False, timeout: Any = None
    ) -> Message:
        """Send a message and record it."""
        core, ranks = mesh._core, mesh._shape.ranks
        name = core.name
        homes = {(name, rank): core.peer(rank).token for rank in ranks}
        sender.sent += 1
        tag = (sender.number, sender.sent)
        message = Message(sender, tag, f"{verb} {endpoint}", homes, verb == "choose", must, order=list(homes))
        self.messages[tag] = message
        method = getattr(mesh, endpoint)
        try:
            message.result = getattr(method.options(timeout) if timeout else method, verb)(tag, *args)
        except SupervisionError as error:
            self._failed(message, error, list(homes))
            return message
        if isinstance(message.result, Future):
            message.result.ignore()  # it may fail after the simulation, and the next simulation expects no log line
        self._remember(message)
        return message

    def close_streams(self) -> None:
        """Close streams that were not read to the end, so that the next simulation gets no report of them."""
        for message in self.messages.values():
            if message.result is not None and not isinstance(message.result, Future):
                with contextlib.suppress(Exception):  # the simulation may be broken on purpose
                    message.result.close()

    def _remember(self, message: Message) -> None:
        result = message.result
        if result is None:
            return
        message.at_once = message.done
        self.waiting[message.tag] = message
        for token in set(message.homes.values()):
            if token in self.dead:
                self._hurry(message.tag, token)
        if isinstance(result, Future):
            result.add_done_callback(partial(self._answered, message))

    def _hurry(self, tag: Tag, token: str) -> None:
        heapq.heappush(self._late, (self.simulation.now + self.bound(token), tag))

    def bound(self, token: str) -> float:
        """Return the seconds within which every process has noticed the end of this process."""
        return BOUND

    def is_cut_off(self, sender: Sender) -> bool:
        """Return whether the sender may fail to reach the program."""
        return False

    def overdue(self, message: Message) -> bool:
        """Return whether the message may wait no longer: the end of no other receiver can be noticed later."""
        return True

    def apart(self, message: Message, key: Key) -> bool:
        """Return whether the network may have lost the message or its reply, though sender and receiver live."""
        return False

    # ---- outcomes of messages

    def ran(self, key: Key, tag: Tag) -> None:
        """Check a message that an actor executes now."""
        self.executed += 1
        message = self.messages[tag]
        if key not in message.homes:
            self.violations.append(f"{key} got {message}, which was not for it")
        elif self.simulation.running.token != message.homes[key]:
            self.violations.append(f"{message} reached {key} in another process than the one that it was sent to")
        if key in message.ran:
            self.violations.append(f"promise 2: {key} executed {message} twice")
        if key in message.unsent:
            self.violations.append(f"promise 2: {key} executes {message}, whose error said that it was not sent")
        if self._last.get((tag[0], key), 0) >= tag[1]:
            self.violations.append(f"promise 1: {key} executed {message} after a later one of the same sender")
        self._last[tag[0], key] = tag[1]
        message.ran.add(key)
        if message.one_of and len(message.ran) > 1:
            self.violations.append(f"promise 2: several ranks executed {message}: {message.ran}")

    def _answered(self, message: Message, future: Any) -> None:
        self.waiting.pop(message.tag, None)
        error = future.exception()
        keys = message.order
        if hasattr(future, "base_rank"):
            keys = [(future.core.name, future.base_rank)]
        if error is None:
            self._valued(message, keys, future.result())
        else:
            # the generators of the other ranks are closed
            message.given_up = message.given_up or message.what == "call items"
            self._failed(message, error, keys)

    def _valued(self, message: Message, keys: list[Key], value: Any) -> None:
        missing = [key for key in keys if key not in message.ran]
        if missing:
            self.violations.append(f"promise 2: {message} has a value, but {missing} did not execute it")
        values = list(value.values()) if hasattr(value, "values") else [value]
        for key, got in zip(keys, values, strict=True):
            first = got[0] if isinstance(got, list) else got
            if (first[0], tuple(first[1])) != (key[1], message.tag):
                self.violations.append(f"{message} has the value {got} for {key}")

    def _failed(self, message: Message, error: BaseException, keys: list[Key]) -> None:
        if isinstance(error, ActorError):
            self._raised(message, error, keys)
        elif isinstance(error, (CancelledError, TimeoutError)):
            if not message.given_up:
                self.violations.append(f"{message} was given up by nobody, and failed with {error!r}")
        elif isinstance(error, SupervisionError):
            self._not_answered(message, error, keys)
        else:
            self.violations.append(f"{message} failed with {error!r}")

    def _raised(self, message: Message, error: ActorError, keys: list[Key]) -> None:
        cause = error.__cause__
        if not isinstance(cause, Boom) or tuple(cause.args[0]) != message.tag:
            self.violations.append(f"{message} failed with {error!r}, caused by {cause!r}")
        key = message.order[error.rank] if len(keys) > 1 else keys[0]
        if key not in message.ran:
            self.violations.append(f"promise 2: {message} failed with an exception of {key}, which did not execute it")

    def _not_answered(self, message: Message, error: SupervisionError, keys: list[Key]) -> None:
        lost = (self.is_gone(message.homes[key]) or key in self.troubled or self.apart(message, key) for key in keys)
        if not any(lost):
            self.violations.append(f"{message} failed, although all its receivers live: {error}")
        if error.delivery == "unknown":
            return
        if error.delivery != "not sent":
            self.violations.append(f"promise 2: the error of {message} says that it {error.delivery!r}")
            return
        if len(keys) > 1 and message.result is not None:
            keys = [key for key in keys if self._names(error, key)]  # the other ranks may have received it
        for key in keys:
            message.unsent.add(key)
            if key in message.ran:
                self.violations.append(f"promise 2: {key} executed {message}, which was not sent: {error}")

    def _names(self, error: SupervisionError, key: Key) -> bool:
        """Return whether the failure is about this actor. Its rank is one of a mesh of actors or of processes."""
        mesh, first = error.failure.mesh_name, self.first.get(key[0], 0)
        return error.rank == (key[1] if mesh in (key[0], "?") else key[1] + first)

    # ---- ports

    def port(self) -> Any:
        """Open a port of the program, to which actors send with `shout`."""
        port, receiver = Channel.open()
        self._listen(receiver)
        return port

    def shout(self, sender: Sender, port: Any, payload: bytes) -> None:
        """Send to a port."""
        sender.sent += 1
        self._shouted[sender].append(sender.sent)
        try:
            port.send((sender.number, sender.sent, payload))
        except PeerGoneError:
            self.violations.append(f"{sender.name} can't reach the program")

    def _listen(self, receiver: Any) -> None:
        def heard(future: Any) -> None:
            number, count, _ = future.result()
            before = self._heard[number]
            if before and before[-1] >= count:
                self.violations.append(f"promise 1: the program heard {count} after {before[-1]} of sender {number}")
            before.append(count)
            self._listen(receiver)

        receiver.recv().add_done_callback(heard)

    def _all_heard(self) -> None:
        for sender, counts in self._shouted.items():
            if sender.process.alive and self._heard[sender.number] != counts:
                self.violations.append(f"promise 3: of {counts} of {sender.name} came {self._heard[sender.number]}")

    # ---- deaths

    def died(self, process: SimulatedProcess) -> None:
        """Record the end of a process."""
        self.dead[process.token] = self.simulation.now
        self.hurry(process.token)

    def hurry(self, token: str) -> None:
        """Start the time limit of every message that waits for this process."""
        for tag, message in self.waiting.items():
            if token in message.homes.values():
                self._hurry(tag, token)

    def is_gone(self, token: str) -> bool:
        """Return whether this process has ended or will never exist."""
        return token in self.dead

    def lost(self, key: Key) -> bool:
        """Return whether the process of this actor has ended, or the actor was never constructed."""
        return self.built.get(key) is None or self.built[key] in self.dead

    def trouble(self, key: Key, why: str, *, loses: bool = True) -> None:
        """Record that an actor died or was told to stop.

        With ``loses=False`` a restarted actor may get its messages.
        """
        self.troubled[key].append(why)
        if loses:
            self.excused.add(key)

    # ---- checks

    def check(self) -> None:
        """Check the invariants after a step."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise AssertionError(f"{MOST_STEPS} steps, and no end: something goes round and round")
        if self.violations:
            raise AssertionError("; ".join(self.violations))
        while self._late and self._late[0][0] < self.simulation.now:
            _, tag = heapq.heappop(self._late)
            message = self.waiting.get(tag)
            if message is None or not message.sender.process.alive or message.done:
                continue
            if not self.overdue(message):
                heapq.heappush(self._late, (self.simulation.now + BOUND, tag))
            else:
                raise AssertionError(f"promise 3: {message} still waits, too long after the death of a receiver")

    def settled(self) -> None:
        """Check, when no event is pending, that every caller has its result and every receiver its messages."""
        for message in list(self.waiting.values()):
            if message.sender.process.alive:
                if not message.done:
                    raise AssertionError(f"promise 3: {message} waits for ever; {self._fates(message)}")
                if not isinstance(message.result, Future):
                    self._drain(message)
        self.check()
        for message in self.messages.values():
            if message.sender.process.alive or message.must:
                self._reached_all(message)
        self._all_heard()
        self._nothing_kept()
        self.check()

    def _fates(self, message: Message) -> str:
        rest = [key for key in message.homes if key not in message.ran]
        dead = [key for key, token in message.homes.items() if token in self.dead]
        trouble = [key for key in message.homes if key in self.troubled]
        return f"{len(message.ran)} executed it, {rest} did not, {dead} have died, {trouble} had trouble"

    def _nothing_kept(self) -> None:
        """Check that no process keeps state of completed calls and messages."""
        for process in self.simulation.processes:
            if process.alive and process.program is not None:
                program, router = process.program, process.program.router
                kept = {
                    "calls": program.pending,
                    "multicasts": router.tree.multicasts,
                    "combiners": router.tree.combiners,
                }
                kept["pieces"] = router.fragments.assemblies
                kept["held back"] = {peer.token: peer.held for peer in router.peers.values() if peer.held}
                for what, left in kept.items():
                    if left:
                        self.violations.append(f"{process.label} still has {what} that are over: {left}")

    def _drain(self, message: Message) -> None:
        del self.waiting[message.tag]
        outcomes = list(message.result)
        if len(outcomes) != len(message.homes):
            self.violations.append(f"{message} gave {len(outcomes)} results for {len(message.homes)} ranks")
        for outcome in outcomes:
            error = outcome.exception()
            if error is None:
                key = message.order[0][0], outcome.result()[0]
                if key not in message.ran:
                    self.violations.append(f"promise 2: {message} has a value of {key}, which did not execute it")
            elif isinstance(error, ActorError):
                self._raised(message, error, message.order)
            elif message.homes and not isinstance(error, SupervisionError):
                self.violations.append(f"{message} failed with {error!r}")

    def _reached_all(self, message: Message) -> None:
        if message.given_up or message.one_of:
            return
        for key, token in message.homes.items():
            excused = self.is_gone(token) or key in self.excused or key in message.unsent or self.apart(message, key)
            if key not in message.ran and (message.must or not excused) and not self._never_sent(message):
                self.violations.append(f"promise 3: {key} lives and never got {message}")

    def _never_sent(self, message: Message) -> bool:
        """Return whether the send failed at once because of a known death, and no receiver got the message."""
        refused = len(message.unsent) == len(message.homes) or (message.at_once and not message.ran)
        return refused and bool(message.unsent) and not message.must
