"""Random worlds of actors that fill each other's queues, call each other, read each other's generators and use ports.

`run` runs one world with the detection of deadlocks, whose probes are frequent. In half of the worlds a cycle that is
found raises nothing: the run goes on, and none of its waits may end any more. Otherwise each member must raise.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from monarch_backend._actor import deadlocks
from monarch_backend._actor.calls import future
from monarch_backend._actor.deadlocks import DeadlockDetector
from monarch_backend._actor.execution import runner
from monarch_backend._actor.meshes import mesh_state
from monarch_backend._testing.process import SimulatedProgressLoop
from monarch_backend._transport.local.event_loop import ProgressLoop
from monarch_backend._transport.local.frames import Deadlock, DeadlockMember
from monarch_backend.actor import Accumulator, Actor, ActorError, DeadlockError, Port, endpoint, this_host
from monarch_backend.testing import Conditions, Simulation, SimulationError

MAX_DEPTH = 3
"""Messages that follow from each other."""

END_S = 1.0
"""Simulated seconds of a world. Waits of a cycle never end, so neither does its event queue."""

RAISE_S = 0.3
"""Simulated seconds from the discovery of a cycle until all of its members must have raised."""


class _EndError(Exception):
    """Raised at the end of a world: its actors still wait."""


@dataclass
class World:
    """One world: its actors, and the cycles that were found."""

    simulation: Simulation
    rng: random.Random
    window: int
    is_dry: bool
    actors: list[Any] = field(default_factory=list)
    known: set[frozenset[tuple[str, int]]] = field(default_factory=set)
    found: list[tuple[float, list[DeadlockMember]]] = field(default_factory=list)
    watched: list[list[Any]] = field(default_factory=list)  # waits of each cycle, in dry worlds
    raised: set[tuple[str, int, int]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    patches: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    # ---- the detection

    def on_claim(self, detector: DeadlockDetector, peer: Any, message: Deadlock) -> None:
        names = frozenset((each.token, each.ref) for each in message.members)
        if message.number == 0 and names not in self.known:
            self.known.add(names)
            self.note(message.members)
        if not self.is_dry:
            _CLAIM(detector, peer, message)

    def note(self, members: list[DeadlockMember]) -> None:
        self.found.append((self.simulation.now, members))
        self.counts["cycles"] += 1
        self.counts["with credit"] += any(not each.waits_for for each in members)
        self.counts["with a port"] += any(each.endpoint == "reply" for each in members)
        self.counts["with a generator"] += any(each.waits_for.endswith(".values") for each in members)
        if not self.is_dry:
            return
        waits = []
        for each in members:
            detector = self.simulation.by_token[each.token].program.deadlocks
            wait = detector._waits.get(each.actor)
            assert wait is not None and wait.ref == each.ref, f"false alarm: {each} waits no more"
            waits.append(wait)
        self.watched.append(waits)

    def on_error(self, members: list[DeadlockMember]) -> DeadlockError:
        self.raised.add(_key(members[0]))
        return _ERROR(members)

    def look(self) -> None:
        """Check the found cycles after each step. The cancellation of a member's message ends its cycle."""
        if self.simulation._broken is not None:  # the waits that it ends are no alarm
            raise self.simulation._broken
        if self.simulation.now > END_S:  # replies of actors that are interrupted by this error do not count
            for name, empty in (("pack_failure", b""), ("pack_error", b""), ("remote_traceback", "")):  # slow
                self.patches.enter_context(mock.patch.object(runner, name, return_value=empty))
            raise _EndError
        self.watched = [waits for waits in self.watched if not any(_is_cancelled(wait) for wait in waits)]
        for waits in self.watched:
            for wait in waits:
                assert not wait.what.ready, f"false alarm: {wait.runner.name} has what it waited for"

    # ---- the program

    def act(self, others: list[Any], everyone: Any, depth: int) -> None:
        """Do one random thing in an actor that knows these other ones."""
        rng, target, below = self.rng, self.rng.choice(others), depth - 1
        count = rng.choice((1, self.window // 2, self.window - 1, self.window, self.window + 1, 2 * self.window))
        limit = rng.choice((1e-3, 0.02, 0.2))
        choices: list[tuple[int, Callable[[], object]]] = [
            (9, lambda: self.fill(target, count, below)),
            (3, lambda: [target.work.call_one(below if i == 0 else 0) for i in range(count)]),
            (4, lambda: [target.work.options(timeout=limit).call_one(0) for _ in range(count)]),
            (4, lambda: target.work.call_one(below).get()),
            (1, lambda: target.work.call_one(below).get(limit)),
            (1, lambda: target.work.options(timeout=limit).call_one(below).get()),
            (3, lambda: list(target.values.call_one(rng.randrange(40), below))),
            (1, lambda: everyone.work.call(below).get()),
            (3, lambda: target.reply.call_one(below).get()),
            (1, lambda: target.reply_elsewhere.call_one(below).get()),
            (1, lambda: everyone.reply.call(below).get()),
            (1, lambda: everyone.values.call(rng.randrange(20), below).get()),
            (1, lambda: target.values.call(rng.randrange(40), below).get()),
            (1, lambda: Accumulator(target.work, None, lambda *_: None).accumulate(below).get()),
        ]
        weights, acts = zip(*choices, strict=True)
        with contextlib.suppress(RuntimeError, ActorError, TimeoutError):  # an error would end a call of all ranks
            rng.choices(acts, weights)[0]()

    def fill(self, target: Any, count: int, depth: int) -> None:
        for _ in range(count):
            target.work.broadcast(depth if self.rng.random() < 2 / self.window else 0)

    def spawn(self, size: int) -> None:
        procs = this_host().spawn_procs({"gpus": size})
        for rank in range(size):
            for place in range(self.rng.choice((1, 1, 2))):
                self.actors.append(procs.slice(gpus=rank).spawn(f"actor{rank}.{place}", Worker))
        everyone = procs.spawn("everyone", Worker)
        for mesh in [*self.actors, everyone]:
            mesh.initialized.get()
            mesh.meet.call([other for other in self.actors if other is not mesh], everyone).get()

    def play(self, size: int) -> None:
        self.spawn(size)
        for _ in range(self.rng.randrange(2, 2 + size)):
            mesh, depth = self.rng.choice(self.actors), self.rng.randrange(1, MAX_DEPTH + 1)
            self.simulation.later(self.rng.random() * 0.1, lambda mesh=mesh, depth=depth: mesh.work.push(depth))
        self.simulation.on_step.append(self.look)
        try:
            self.simulation.run()
        except _EndError:
            pass
        except SimulationError as error:
            if "as many as one stack holds" not in str(error):
                raise
            self.counts["too deep"] += 1
            return
        self.counts["ended"] += self.simulation.now <= END_S
        if not self.is_dry:
            self.check_raised()

    def check_raised(self) -> None:
        """Check that all members of each cycle have raised. A member of two cycles ends both when it raises."""
        cycles = Counter(_key(each) for _, members in self.found for each in members)
        for when, members in self.found:
            if when < END_S - RAISE_S:
                missing = [each for each in members if _key(each) not in self.raised]
                is_alone = all(cycles[_key(each)] == 1 for each in members)
                assert not missing or (len(missing) < len(members) and not is_alone), f"not raised: {missing}"


class Worker(Actor):
    """Actor that does random things. ``here`` is the current world."""

    @endpoint
    def meet(self, others: list[Any], everyone: Any) -> None:
        self.known = others, everyone

    @endpoint
    def work(self, depth: int) -> None:
        for _ in range(here.rng.randrange(1, 4) if depth > 0 else 0):
            here.act(*self.known, depth)

    @endpoint(explicit_response_port=True)
    def reply(self, port: Port[int], depth: int) -> None:
        """Reply before or after something that may wait."""
        if here.rng.random() < 0.2:
            port.send(1)
        if depth > 0:
            here.act(*self.known, depth)
        port.send(2)

    @endpoint(explicit_response_port=True)
    def reply_elsewhere(self, port: Port[int], depth: int) -> None:
        """Leave the reply to an event or to another actor, and do something that may wait."""
        if here.rng.random() < 0.5:
            here.simulation.later(here.rng.random() * 0.1, functools.partial(port.send, 3))
        else:
            here.rng.choice(self.known[0]).send_to.push(port)
        if depth > 0:
            here.act(*self.known, depth)

    @endpoint
    def send_to(self, port: Port[int]) -> None:
        port.send(4)

    @endpoint
    def values(self, count: int, depth: int) -> Iterator[int]:
        yield from range(count)
        if depth > 0:
            here.act(*self.known, depth)
        yield from range(count // 2)


here: Any = None

_CLAIM, _ERROR = DeadlockDetector._claim, deadlocks._error


class _UnreportedError:
    """Replaces `UnreadError`: the last errors of a world come from its end, and are not read."""

    def __init__(self, *_: object) -> None:
        """Keep nothing."""

    def forget(self) -> None:
        """Do nothing, since nothing is reported."""


def _key(member: DeadlockMember) -> tuple[str, int, int]:
    return member.token, member.actor, member.ref


def _is_cancelled(wait: Any) -> bool:
    return bool(wait.runner.code.is_cancelled or wait.runner.failure is not None)


def run(seed: int, size: int | None = None) -> World:
    """Run one world. Raise an AssertionError for an alarm that is false, and for a member that does not raise."""
    global here
    rng = random.Random(seed)
    size = size or rng.choice((2, 3, 4, 8, 12))
    window = rng.choice((4, 16, 40, 64))
    conditions = replace(Conditions.draw(rng, size), unstartable=0.0, dies_at_start=0.0)
    simulation = Simulation(seed, conditions, window=window)
    world = here = World(simulation, rng, window, rng.random() < 0.5)
    with world.patches as stack:
        for name, value in (
            ("ProgressLoop", (ProgressLoop, SimulatedProgressLoop)),
            ("FIRST_PROBE_S", rng.choice((1e-4, 1e-3, 1e-2))),
            ("MAX_PROBE_INTERVAL_S", 0.05),
            ("_error", world.on_error),
        ):
            stack.enter_context(mock.patch.object(deadlocks, name, value))
        stack.enter_context(mock.patch.object(DeadlockDetector, "_claim", lambda *args: world.on_claim(*args)))
        for module in (future, mesh_state):
            stack.enter_context(mock.patch.object(module, "UnreadError", _UnreportedError))
        stack.enter_context(simulation)
        world.play(size)
    return world
