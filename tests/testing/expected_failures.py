"""Expected reports of failures: which owner gets which report, and how often. `Faults` counts and compares.

Each death is a fault of its mesh unless an owner handles it. If an actor's last message and the death of
its process race, both outcomes are right. The count then has a minimum and a maximum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from monarch_backend.actor import MeshFailure
from monarch_backend.testing import SimulatedProcess
from tests.testing.invariants import Boom, Key, Tag, Watch

Policy = Literal["none", "forever", "all", "twice"]
TWICE = 2
ANY = -1
"""Rank of failures above a restart limit.

Which death exceeds the limit depends on the order in which the owner learns of them.
"""


@dataclass(eq=False)
class Mesh:
    """A mesh of processes or actors of a run."""

    name: str
    size: int
    policy: Policy
    boss: Key | None = None  # the actor that has spawned it; None: the program
    procs: Mesh | None = None  # for a mesh of actors: the mesh of their processes
    first: int = 0  # for a mesh of actors: the rank of the process with actor 0
    stopped: bool = False
    deaths: int = 0


class Question(NamedTuple):
    """A supervisor that must be asked about an actor, if the process of the observer lives long enough to report."""

    boss: Key
    about: Key
    observer: Key


class Faults:
    """The expected failures of one simulation."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.meshes: dict[str, Mesh] = {}
        self.least: Counter[Key] = Counter()
        self.most: Counter[Key] = Counter()
        self.booms: dict[Key, set[Tag]] = defaultdict(set)  # by actor
        self.codes: dict[Key, set[int | None]] = defaultdict(set)  # exit codes of processes
        self.aborted: set[Key] = set()
        self.asked_about: set[Key] = set()
        self.to_ask: list[Question] = []
        self._uncertain: list[tuple[Key, str]] = []  # failures that a process reports if it lives long enough
        watch.simulation.on_death.append(self.process_died)

    # ---- events

    def add(self, mesh: Mesh) -> Mesh:
        """Add a mesh that has been spawned."""
        self.meshes[mesh.name] = mesh
        return mesh

    def stop(self, mesh: Mesh) -> None:
        """Record that a mesh and all actors in it are told to stop."""
        mesh.stopped = True
        for rank in (ANY, *range(mesh.size)):
            self.least[mesh.name, rank] = 0  # its owner may not have noticed a death before
            self._uncertain = [(key, token) for key, token in self._uncertain if key != (mesh.name, rank)]
            self.watch.trouble((mesh.name, rank), "stopped")
        for other in self.meshes.values():
            if other.procs is mesh and not other.stopped:
                self.stop(other)

    def boom(self, key: Key, tag: Tag, *, supervising: bool = False) -> Boom:
        """Return the exception that ends an actor."""
        self.booms[key].add(tag)
        if not supervising:
            self._actor_died(key)
        return Boom(tag)

    def ends_itself(self, key: Key, how: str) -> None:
        """Record that an actor ends itself or its process."""
        if how == "abort":
            self.aborted.add(key)
            self._actor_died(key)
        elif how == "stop":
            self.watch.trouble(key, how)

    def _actor_died(self, key: Key) -> None:
        mesh = self.meshes[key[0]]
        mesh.deaths += 1
        again = mesh.policy in ("forever", "all")
        for rank in range(mesh.size) if mesh.policy == "all" else [key[1]]:
            self.watch.trouble((mesh.name, rank), "died", loses=not again)
        if mesh.boss is not None:
            self.most[mesh.boss] = max(self.most[mesh.boss], 1)
            self.to_ask.append(Question(mesh.boss, key, key))
        elif not mesh.stopped and mesh.policy == "none":
            self.most[key] += 1
            self._uncertain.append((key, self.watch.simulation.running.token))
        elif not mesh.stopped and mesh.policy == "twice" and mesh.deaths > TWICE:
            self.most[mesh.name, ANY] += 1

    def process_died(self, process: SimulatedProcess) -> None:
        """Record the end of a process, whatever its cause."""
        if not process.mesh:
            return  # the main program, or a daemon, agent or gateway of a host
        mesh, key = self.meshes[process.mesh], (process.mesh, process.rank)
        self.codes[key].add(process.returncode)
        for other in self.meshes.values():
            if other.boss is not None and self._lives_in(other.boss, mesh, process.rank):
                for rank in range(other.size):
                    self.watch.trouble((other.name, rank), "its owner is gone")
            elif other.boss is not None and (other.procs is mesh or other is mesh):
                self.most[other.boss] = max(self.most[other.boss], 1)
                # its owner does not restart the actor
                self.watch.trouble((other.name, process.rank), "its process is gone")
                if other.procs is None or mesh.boss is None:
                    self.to_ask.append(Question(other.boss, (other.name, process.rank), other.boss))
        if mesh.stopped or mesh.boss is not None:
            return
        mesh.deaths += 1
        if mesh.policy == "none" or (mesh.policy == "twice" and mesh.deaths > TWICE):
            counted = key if mesh.policy == "none" else (mesh.name, ANY)
            self.most[counted] += 1
            self.least[counted] += 1

    def _lives_in(self, boss: Key, procs: Mesh, rank: int) -> bool:
        return self.meshes[boss[0]].procs is procs and boss[1] == rank

    def asked(self, boss: Key, failure: MeshFailure, handled: bool) -> None:
        """Record that a supervisor was asked about a failure, and whether it handled the failure."""
        self.asked_about.update((failure.mesh_name, rank) for rank in failure.ranks)
        if failure.mesh_name not in self.meshes or self.meshes[failure.mesh_name].boss != boss:
            self.watch.violations.append(f"promise 7: {boss} was asked about {failure}, which is not its own")
        if handled:
            return
        self._uncertain.append((boss, self.watch.simulation.running.token))
        for mesh in self.meshes.values():
            if mesh.boss == boss:
                for rank in range(mesh.size):
                    self.watch.trouble((mesh.name, rank), "its owner has ended")
        self.watch.trouble(boss, "did not handle a failure")

    # ---- reported failures

    def compare(self, told: list[MeshFailure]) -> None:
        """Compare the failures that reached the program with the expected ones."""
        for boss, about, observer in self.to_ask:
            lost = self.watch.lost(boss) or self.watch.lost(observer) or boss in self.watch.troubled
            if about not in self.asked_about and not lost:
                raise AssertionError(f"promise 7: {boss} was never asked about {about}")
        least = Counter(self.least)
        least.update(key for key, token in self._uncertain if token not in self.watch.dead)
        found: Counter[Key] = Counter()
        for failure in told:
            name, rank = self._checked(failure)
            found[name, ANY if self.meshes[name].policy == "twice" else rank] += 1
        for key in {*least, *self.most, *found}:
            if not least[key] <= found[key] <= max(self.most[key], least[key]):
                texts = [str(failure) for failure in told if failure.mesh_name == key[0]]
                raise AssertionError(
                    f"promise 7: the program was told {found[key]} times of a failure of {key}, which is not "
                    f"{least[key]} to {self.most[key]}: {texts}"
                )

    def _checked(self, failure: MeshFailure) -> Key:
        (death,) = failure.deaths
        key = failure.mesh_name, death.rank
        root = _root(failure)
        if self.meshes[failure.mesh_name].procs is None:
            self._checked_process(key, death)
        elif isinstance(root, Boom):
            known = {tag for other, tags in self.booms.items() for tag in tags if self._led_to(other, key)}
            assert tuple(root.args[0]) in known, f"promise 7: {failure!r} has the cause {root!r}"
        else:
            assert isinstance(root, MeshFailure), f"promise 7: {failure!r} has the cause {root!r}"
            (first,) = root.deaths
            mesh = self.meshes[root.mesh_name]
            if (root.mesh_name, first.rank) not in self.aborted:
                self._checked_process(((mesh.procs or mesh).name, first.rank + mesh.first), first)
        assert failure.report().startswith("root cause: "), failure.report()
        return key

    def _led_to(self, first: Key, key: Key) -> bool:
        return first == key or self.meshes[first[0]].boss == key

    def _checked_process(self, key: Key, death: Any) -> None:
        if self.lost_with_host(key, death):
            return
        if None in self.codes[key] and "could not be started" in death.what:
            return
        if self.codes[key] and "can't be reached" in death.what:
            return  # reported by a process that has never connected to it
        assert death.returncode in self.codes[key], f"promise 7: {death} of {key}, which ended with {self.codes[key]}"

    def lost_with_host(self, key: Key, death: Any) -> bool:
        """Return whether the report is about the loss of a whole host."""
        return False


def _root(failure: BaseException) -> BaseException:
    while failure.__cause__ is not None:
        failure = failure.__cause__
    return failure
