"""Meshes of a recording, and the mesh of each actor.

The process that spawns a mesh records it. Its actors may run in other programs: below the daemons of a job's hosts.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.labels import mesh_of
from monarch_backend._telemetry.program_recording import ProcessRecording, Recording
from monarch_backend._telemetry.programs import Program
from monarch_backend._telemetry.recorder import row_major

_WHOLE = object()
"""View of a mesh whose event has none: all ranks, or the first ones, in order."""


@dataclass(eq=False)
class RecordedMesh:
    """A mesh of actors on the mesh of processes ``procs``, or a mesh of processes if ``procs`` is None.

    ``about`` is what its ``maker`` has recorded at time ``made_ns``. All three are empty if that was not read.
    """

    name: str
    procs: str | None
    program: Program
    maker: ProcessRecording | None = None
    made_ns: int | None = None
    about: dict[str, Any] | None = None
    id: int = 0
    actors_seen: int = 0
    parent: RecordedMesh | None = None

    @property
    def _sizes(self) -> dict[str, int]:
        found = (self.about or {}).get("sizes")
        return found if isinstance(found, dict) else {}

    @property
    def size(self) -> int:
        """Number of ranks, 0 if it is unknown."""
        return math.prod(self._sizes.values()) if self._sizes else 0

    @property
    def of_class(self) -> str | None:
        """Class as Monarch has it: "Proc" for a mesh of processes, ``Python<Trainer>`` for one of actors."""
        name = (self.about or {}).get("class")
        if self.procs is None:
            return "Proc" if name else None
        return f"Python<{_last(name)}>" if name else None

    @property
    def shape_json(self) -> str | None:
        """Names and sizes of the dimensions, as JSON."""
        sizes = self._sizes
        return json.dumps({"inner": {"labels": list(sizes), "sizes": list(sizes.values())}}) if sizes else None

    @property
    def region_json(self) -> str | None:
        """Selected ranks of the processes, as JSON: a slice with names of its dimensions. None if they form none."""
        sizes, view = self._sizes, (self.about or {}).get("view", _WHOLE)
        if not sizes or view is None:
            return None
        offset, strides = view if view is not _WHOLE else (0, row_major(sizes.values()))
        of_slice = {"offset": offset, "sizes": list(sizes.values()), "strides": list(strides)}
        return json.dumps({"labels": list(sizes), "slice": of_slice})

    def display_name(self, rank: int | None) -> str | None:
        """Return the text for an actor of this rank, such as ``<Trainer trainers{'gpus': 1/2}>``."""
        name, sizes = (self.about or {}).get("class"), self._sizes
        if not name or rank is None or not 0 <= rank < self.size:
            return None
        steps = zip(sizes.items(), row_major(sizes.values()), strict=True)
        at = [f"'{label}': {rank // step % size}/{size}" for (label, size), step in steps]
        return f"<{name} {self.name}{{{', '.join(at)}}}>"


class RecordedMeshes:
    """The meshes of a recording, numbered from 1: first those of actors."""

    def __init__(self, recording: Recording) -> None:
        of_actors, of_processes = _recorded(recording)
        self._of_name = defaultdict[str, list[RecordedMesh]](list)
        for mesh in of_actors:
            self._of_name[mesh.name].append(mesh)
        self._of_actor = dict[tuple[int, str], RecordedMesh]()
        unrecorded = dict[tuple[tuple[str, int], str, str], RecordedMesh]()
        for process in recording.processes:
            procs = mesh_of(process.label)
            for name in process.rank_of_actor:
                found = self._mesh_of(process, name, procs)
                if found is None:
                    made = RecordedMesh(name, procs or None, process.program)
                    found = unrecorded.setdefault((process.program.key, procs, name), made)
                found.actors_seen += 1
                self._of_actor[id(process), name] = found
        for mesh in of_actors:
            mesh.parent = _parent(mesh, [each for each in of_processes if each.name == mesh.procs])
        self.of_actors = [*of_actors, *unrecorded.values()]
        self.of_processes = of_processes
        for mesh in unrecorded.values():
            self._of_name[mesh.name].append(mesh)
        for number, mesh in enumerate([*self.of_actors, *self.of_processes], 1):
            mesh.id = number

    def of_actor(self, process: ProcessRecording, name: str) -> RecordedMesh:
        """Return the mesh of an actor that the recording has."""
        return self._of_actor[id(process), name]

    def of_receivers(self, sender: ProcessRecording, name: str) -> RecordedMesh | None:
        """Return the mesh to which a process has sent a message, None if several have this name."""
        return _only(
            self._of_name.get(name, []),
            [lambda each: each.maker is sender, lambda each: each.program is sender.program],
        )

    def _mesh_of(self, process: ProcessRecording, name: str, procs: str) -> RecordedMesh | None:
        named = self._of_name.get(name, [])
        on_it = [each for each in named if each.procs == procs]
        return _only(
            on_it or [each for each in named if each.maker is process],  # an actor beside the one that has spawned it
            [
                lambda each: each.maker is process,
                lambda each: each.maker is not None and _is_starter(each.maker, process),
                lambda each: each.program is process.program,
                lambda each: each.maker is not None and each.maker.recorded.identity in process.senders(),
            ],
        )


def _recorded(recording: Recording) -> tuple[list[RecordedMesh], list[RecordedMesh]]:
    """Return the meshes of actors and those of processes whose making was read."""
    found: tuple[dict[object, RecordedMesh], dict[object, RecordedMesh]] = {}, {}
    for process in recording.processes:
        for event in process.events(Kind.MESH):
            about = _object(event.detail)
            if event.detail and not about:  # a later event of its life, such as "ready"
                continue
            procs = str(about["procs"]) if "procs" in about else None
            mesh = RecordedMesh(event.name, procs, process.program, process, event.end_ns, about)
            found[procs is None][id(process), procs, event.name] = mesh
    of_actors, of_processes = found
    return list(of_actors.values()), list(of_processes.values())


def _parent(mesh: RecordedMesh, named: list[RecordedMesh]) -> RecordedMesh | None:
    return _only(named, [lambda each: each.maker is mesh.maker, lambda each: each.program is mesh.program])


def _is_starter(maker: ProcessRecording, process: ProcessRecording) -> bool:
    return (maker.host, maker.pid) == (process.host, process.process.parent)


def _only(
    found: list[RecordedMesh], preferred: Sequence[Callable[[RecordedMesh], bool]]
) -> RecordedMesh | None:  # fmt: skip
    """Return the only mesh of these. Of several, each condition in turn leaves those that have it, if any do."""
    for condition in preferred:
        if len(found) < 2:
            break
        found = [each for each in found if condition(each)] or found
    return found[0] if len(found) == 1 else None


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _object(detail: str) -> dict[str, Any]:
    try:
        found = json.loads(detail)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
