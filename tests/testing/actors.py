"""Actors of the random worlds: they record executed messages, send to others, and fail on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_backend.actor import Actor, MeshFailure, context, endpoint, get_or_spawn_controller, this_host
from tests.testing.expected_failures import Faults
from tests.testing.invariants import Boom, Key, Tag, Watch

Order = tuple[str, Any, str, tuple[Any, ...]]  # a verb, ranks (None: all), an endpoint, arguments after the tag


@dataclass
class Here:
    """The run of the simulated actors, which all are in this process."""

    watch: Watch
    faults: Faults


here: Any = None  # the `Here` of the current run


def part(mesh: Any, ranks: Any) -> Any:
    """Return the part of a mesh with one rank, a range of ranks, or all ranks."""
    return mesh if ranks is None else mesh.slice(gpus=slice(*ranks) if isinstance(ranks, (tuple, list)) else ranks)


class Probe(Actor):
    """Actor that reports each message that it executes."""

    def __init__(self, fragile: int | None = None) -> None:
        me = context().actor_instance
        self.key: Key = (me.name, me.rank.rank)
        here.watch.built[self.key] = here.watch.simulation.running.token
        self.sender = here.watch.sender(f"{me.name}[{me.rank.rank}]")
        if fragile == me.rank.rank:
            raise here.faults.boom(self.key, (0, 0))

    def _take(self, tag: Any) -> tuple[int, Tag]:
        here.watch.ran(self.key, tuple(tag))
        return self.key[1], tuple(tag)

    @endpoint
    def take(self, tag: Tag, payload: bytes = b"") -> Any:
        return self._take(tag)

    @endpoint
    def fail(self, tag: Tag) -> Any:
        """Raise an exception. A caller gets it as an error; without a caller it ends the actor."""
        self._take(tag)
        raise Boom(tuple(tag))

    @endpoint
    def fall(self, tag: Tag, how: str) -> None:
        """End the actor or its process, as ``how`` says. Only broadcasts use it."""
        self._take(tag)
        if how == "raise":
            raise here.faults.boom(self.key, tuple(tag))
        if how == "exit":
            here.watch.simulation.running.die(3)
            raise SystemExit(3)
        here.faults.ends_itself(self.key, how)
        getattr(context().actor_instance, how)("told to")

    @endpoint
    def items(self, tag: Tag, count: int) -> Any:
        taken = self._take(tag)
        for _ in range(count):
            yield taken

    @endpoint
    def relay(self, tag: Tag, orders: Sequence[Order], mesh: Any) -> Any:
        """Send messages to other actors, without waiting for them."""
        taken = self._take(tag)
        for verb, ranks, name, args in orders:
            here.watch.send(self.sender, verb, part(mesh, ranks), name, *args)
        return taken

    @endpoint
    def shout(self, tag: Tag, port: Any, payload: bytes) -> Any:
        taken = self._take(tag)
        here.watch.shout(self.sender, port, payload)
        return taken

    @endpoint
    def find(self, tag: Tag) -> Any:
        """Send to the one actor of a name. The first process that asks for the actor spawns it."""
        taken = self._take(tag)
        get_or_spawn_controller("registered", Probe).add_done_callback(self._found)
        return taken

    def _found(self, future: Any) -> None:
        if future.exception() is not None and here.watch.is_cut_off(self.sender):
            return
        here.watch.send(self.sender, "call_one", future.result(), "take")

    @endpoint
    def ask(self, tag: Tag, rank: int, mesh: Any) -> Any:
        """Call another actor, and wait for its reply."""
        taken = self._take(tag)
        here.watch.send(self.sender, "call_one", part(mesh, rank), "take").result.exception()
        return taken


class Boss(Probe):
    """Probe that owns other actors. ``says`` is its reply to reports of their failures."""

    def __init__(self, crew: str, says: Any, procs: Any, own: int) -> None:
        super().__init__()
        self.says = says
        self.procs = procs if procs is not None else this_host().spawn_procs({"gpus": own}, name=f"{crew}-procs")
        self.crew = self.procs.spawn(crew, Probe)

    @endpoint
    def lead(self, tag: Tag, orders: Sequence[Order]) -> Any:
        taken = self._take(tag)
        for verb, ranks, name, args in orders:
            here.watch.send(self.sender, verb, part(self.crew, ranks), name, *args)
        return taken

    def __supervise__(self, failure: MeshFailure) -> bool:
        here.faults.asked(self.key, failure, self.says is True)
        if self.says == "raise":
            raise here.faults.boom(self.key, (0, 0), supervising=True)
        return bool(self.says)
